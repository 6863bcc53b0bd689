"""Rules as files: one .safetensors file holds config, arrays and origin, and asks nothing else."""

import functools
import os
import secrets
import warnings
from importlib import resources
from pathlib import Path

from celo2 import hub
from celo2.encoding import MAX_FILE, from_bytes, to_bytes
from celo2.rule import Rule

SHIPPED = ("celo2", "celo2-base")


def load(path: str | os.PathLike[str]) -> Rule:
    """The rule in a file, or at an address on the Hugging Face hub.

    Args:
        path: a `.safetensors` file, or `hf://user/repo`, optionally with `@revision` and with
            `/folder/file.safetensors` (default `rule.safetensors`).

    Its arrays are float32 and read-only.

    >>> rule = celo2.load("rule.safetensors")  # doctest: +SKIP
    >>> rule.config.hidden  # doctest: +SKIP
    (8, 8)
    """
    source = os.fspath(path)
    if hub.is_address(source):
        return from_bytes(read_file(hub.download(source)), source)
    return from_bytes(read_file(Path(source)), source)


def save(rule: Rule, path: str | os.PathLike[str]) -> None:
    """Writes a rule to a file, whole or not at all.

    Args:
        rule: its arrays may be of any floating type, JAX's included, and are stored as float32.
        path: where to; a file already there is replaced.

    Tuples in the origin come back as lists; all else in it comes back as it was.

    >>> celo2.save(rule, "rule.safetensors")  # doctest: +SKIP
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is not a folder: make it before saving {target}.")
    if target.is_dir():
        raise ValueError(f"{target} is a folder: name a file in it, such as rule.safetensors.")
    write_whole(target, to_bytes(rule))


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_name(f".celo2-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def pretrained(name: str = "celo2") -> Rule:
    """A rule shipped with celo2: `celo2` or `celo2-base`. Needs no network.

    >>> celo2.pretrained("celo2").config.hidden  # doctest: +SKIP
    (8, 8)
    """
    if name not in SHIPPED:
        raise ValueError(f"{name!r} is not a shipped rule; there are {', '.join(SHIPPED)}.")
    rule = _shipped(name)
    if rule.origin.get("trained") == "no":
        warnings.warn(
            f"The shipped rule {name!r} is an untrained placeholder: it will not optimize well. "
            "Use a rule of your own, or turn a published checkpoint into one with `celo2 convert`.",
            stacklevel=2,
        )
    return rule


def as_rule(rule: Rule | str | os.PathLike[str]) -> Rule:
    """The rule that an optimizer's argument means: itself, a shipped name, a file or an address."""
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, str) and rule in SHIPPED:
        return pretrained(rule)
    if isinstance(rule, (str, os.PathLike)):
        return load(rule)
    raise TypeError(
        f"rule={rule!r} is a {type(rule).__name__}; give a Rule, a shipped name "
        f"({', '.join(SHIPPED)}), a .safetensors file or an hf:// address."
    )


@functools.cache
def _shipped(name: str) -> Rule:
    # Through the package, not "celo2.pretrained": importing that would hide the function.
    file = resources.files("celo2").joinpath("pretrained", f"{name}.safetensors")
    return from_bytes(file.read_bytes(), f"the shipped rule {name!r}")


def _shipped_hint(path: Path) -> str:
    if str(path) in SHIPPED:
        return f'; celo2.pretrained("{path}") is the shipped rule of that name'
    return "" if path.suffix else f"; the shipped rules are {', '.join(SHIPPED)}"


def read_file(path: Path) -> bytes:
    """A file's bytes, if it is one and not larger than any rule."""
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}{_shipped_hint(path)}.")
    if not path.is_file():
        raise ValueError(f"{path} is not a file but a folder or a device: name the file itself.")
    with open(path, "rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise ValueError(f"{path} is larger than {MAX_FILE // 2**20} MB: it is not a rule.")
    return data
