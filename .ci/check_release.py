"""Builds the distributions and tries them as users will, in new environments without network.

    python .ci/check_release.py [--out dist] [--wheels FOLDER] [--tests PATH ...]

Needs `build`, `twine` and, for the tests, the extra `test`. Dependencies are downloaded first; from
then on `pip` sees no index, and a process that opens a connection fails. Three minutes.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Exactly this torch: other specifications may fetch gigabytes of CUDA.
EXTRAS = {"": [], "jax": [], "torch": ["torch==2.13.0"]}

OFFLINE = """
import importlib.util, sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise SystemExit(f"no network was to be needed, but: {event} {arguments}")
sys.addaudithook(refuse)
import celo2
rule = celo2.pretrained("celo2")
celo2.save(rule, "rule.safetensors")
assert celo2.load("rule.safetensors").weights.keys() == rule.weights.keys()
assert celo2.__version__ == VERSION and "site-packages" in celo2.__file__
def missing(name): return importlib.util.find_spec(name) is None
"""
STEPS = {
    "": 'assert missing("jax") and missing("torch")\n',
    "jax": """
assert missing("torch")
import celo2.jax, jax.numpy as jnp, optax
params = {"layer": {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)}}
tx = celo2.jax.celo2(1e-2, weight_decay=0.1, rule="rule.safetensors")
updates, _ = tx.update(params, tx.init(params), params)
moved = optax.apply_updates(params, updates)["layer"]["kernel"]
assert bool(jnp.all(jnp.isfinite(moved)) & jnp.any(moved != 1.0))
""",
    "torch": """
assert missing("jax")
import torch
from celo2.torch import Celo2
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
before = model[0].weight.detach().clone()
optimizer = Celo2(model, lr=1e-2, weight_decay=0.1, rule="rule.safetensors")
model(torch.ones(3, 8)).square().sum().backward()
optimizer.step()
assert torch.isfinite(model[0].weight).all() and not torch.equal(model[0].weight, before)
""",
}
# What reads golden vectors, recipes, records, documentation and examples.
TESTS = [
    "tests/test_reference.py",
    "tests/test_docs.py",
    "tests/test_recipes.py",
    "tests/test_tables.py",
]


def run(*command: str | Path, cwd: Path = ROOT, shown: bool = False) -> None:
    """Runs a command; its output is shown where `shown`, or where it fails."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=not shown, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout or ''}{done.stderr or ''}")


def build(out: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution of this tree, both checked by twine."""
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    wheel, sdist = max(out.glob("*.whl")), max(out.glob("*.tar.gz"))
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    return wheel, sdist


def try_wheel(wheel: Path, extra: str, wheels: Path, folder: Path) -> None:
    """Installs the wheel with an extra into an empty environment and takes a step there."""
    wanted = [f"{wheel}[{extra}]" if extra else str(wheel), *EXTRAS[extra]]
    run(sys.executable, "-m", "pip", "download", "--quiet", "--dest", wheels, *wanted)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "--isolated", "install", "--quiet", "--no-index")
    run(*pip, "--find-links", wheels, *wanted)
    version = wheel.name.split("-")[1]
    run(python, "-I", "-c", f"VERSION = {version!r}\n{OFFLINE}{STEPS[extra]}", cwd=folder)


def try_sdist(sdist: Path, folder: Path, tests: list[str]) -> None:
    """Runs tests of the unpacked source distribution on its own sources."""
    with tarfile.open(sdist) as archive:
        # Python before 3.11.4 has no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    (unpacked,) = folder.iterdir()
    path = f"import sys; sys.path.insert(0, {str(unpacked / 'src')!r}); import celo2, pytest; "
    here = f"assert celo2.__file__.startswith({str(unpacked)!r}), celo2.__file__; "
    code = path + here + "sys.exit(pytest.main(['-q', '-x', *sys.argv[1:]]))"
    run(sys.executable, "-c", code, *tests, cwd=unpacked, shown=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--wheels", type=Path, help="where downloads are kept for the next time")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="of the source distribution")
    options = parser.parse_args()
    wheel, sdist = build(options.out.resolve())
    print(f"built and checked: {wheel.name}, {sdist.name}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheels = (options.wheels or folder / "wheels").resolve()
        for extra in EXTRAS:
            try_wheel(wheel, extra, wheels, folder / f"venv-{extra}")
            print(f"installed offline and tried: celo2[{extra}]")
        try_sdist(sdist, folder / "sdist", options.tests)
    print("tests of the source distribution passed")


if __name__ == "__main__":
    main()
