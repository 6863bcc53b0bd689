"""Which part of the package may import which, read from the import lines."""

import ast
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from conftest import run_python

SOURCE = Path(__file__).resolve().parents[1] / "src" / "celo2"

# All that a part may import of ours; a file of the same part is always allowed.
MAY_IMPORT = {
    "rule": set(),
    "velo": {"rule"},
    "rulefile": {"rule", "velo"},
    "routing": {"rule"},
    "published": {"rule", "velo", "rulefile"},
    "__init__": {"rule", "rulefile"},
    "jax": {"rule", "velo", "rulefile", "routing"},
    "torch": {"rule", "rulefile", "routing"},
    "tasks": {"rulefile"},
    "baselines": {"rule", "jax"},
    "runs": {"rulefile"},
    "metatrain": {"rule", "rulefile", "jax", "tasks", "baselines", "runs"},
    "evaluate": {
        *("rule", "velo", "rulefile", "routing", "jax", "tasks", "baselines", "runs", "metatrain"),
    },
    "commands": {"rule", "rulefile", "tasks", "runs", "metatrain", "evaluate"},
    # These come with celo2/__init__.py in any case; the others it imports inside functions.
    "cli": {"__init__", "rule", "velo", "rulefile"},
}
# What it may import besides, inside functions only.
MAY_IMPORT_LAZILY = {"cli": MAY_IMPORT.keys() - {"cli"}}

# Parts that must work where no extra is installed, and the packages they may import at once.
BARE_PARTS = {"__init__", "rule", "velo", "rulefile", "routing", "published", "cli"}
BARE_PACKAGES = {"numpy", "safetensors"}
FOREIGN = {"jax": {"torch"}, "torch": {"jax", "jaxlib", "optax", "flax"}}


class Import(NamedTuple):
    """One imported module by its full name; `lazy` inside a function."""

    module: str
    lazy: bool
    line: int


def imports_of(source: str, package: str) -> list[Import]:
    """Every import in `source`, a module of `package`; relative names are made absolute."""
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, lazy, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            # `from celo2 import jax` names a part only by what it imports.
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "celo2" else [base]
            found.extend(Import(name, lazy, node.lineno) for name in names)
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    base = parents[: len(parents) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def part_of(module: str) -> str | None:
    """The part of one of our modules by its full name, None for anyone else's.

    A name taken from the package itself, as in `from celo2 import load`, is the entrance's.
    """
    first, *rest = module.split(".")
    if first != "celo2":
        return None
    return rest[0] if rest and rest[0] in MAY_IMPORT else "__init__"


def offences(part: str, found: list[Import]) -> list[str]:
    """What `part` imports that it must not."""
    wrong = []
    for module, lazy, line in found:
        other, package = part_of(module), module.split(".")[0]
        allowed = MAY_IMPORT[part] | {part}
        if lazy:
            allowed = allowed | MAY_IMPORT_LAZILY.get(part, set())
        if other is not None and other not in allowed:
            wrong.append(f"line {line}: {part} must not import {module}")
        if package in FOREIGN.get(part, set()) | {"pickle"}:
            wrong.append(f"line {line}: {part} must not import {module}")
        standard = package in sys.stdlib_module_names
        if part in BARE_PARTS and not (lazy or other or standard or package in BARE_PACKAGES):
            wrong.append(f"line {line}: {part} must import {module} inside a function")
    return wrong


def _part_of_file(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_file_imports_only_what_it_may(path):
    assert _part_of_file(path) in MAY_IMPORT, f"{path.name} is in no part of the package"
    package = ".".join(["celo2", *path.relative_to(SOURCE).parts[:-1]])
    assert offences(_part_of_file(path), imports_of(path.read_text("utf-8"), package)) == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("rule", "from celo2.routing import MatrixView"),
        ("rule", "def f():\n    from celo2 import routing"),
        ("routing", "import jax"),
        ("rulefile", "import huggingface_hub"),
        ("routing", "from celo2 import rulefile"),
        ("published", "import msgpack"),
        ("jax", "from celo2.torch import Celo2"),
        ("jax", "from ..torch.update import combine"),
        ("jax", "from .. import load"),
        ("torch", "def f():\n    import jax.numpy as jnp"),
        ("tasks", "from celo2 import Rule"),
        ("metatrain", "def f():\n    import celo2.evaluate.training"),
        ("metatrain", "from celo2.cli import main"),
        ("cli", "from celo2.evaluate import run"),
        ("cli", "import tyro"),
        ("evaluate", "import pickle"),
    ],
)
def test_offence_is_found(part, source):
    assert len(offences(part, imports_of(source, f"celo2.{part}"))) == 1


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("routing", "import math\nfrom celo2.rule import RuleConfig"),
        ("published", "import numpy\ndef f():\n    from celo2 import rulefile"),
        ("jax", "import jax\nfrom .moments import init_state\nfrom ..routing import MatrixView"),
        ("cli", "import celo2\ndef main():\n    from celo2.metatrain import metatrain"),
    ],
)
def test_allowed_import_is_no_offence(part, source):
    assert offences(part, imports_of(source, f"celo2.{part}")) == []


def test_importing_celo2_loads_neither_jax_nor_torch():
    code = "import sys, celo2; print({'jax', 'torch', 'huggingface_hub'} & sys.modules.keys())"
    assert run_python(code).strip() == "set()"
