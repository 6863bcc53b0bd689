"""What all tests share: strict JAX settings, where optional files are, clean subprocesses."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).resolve().parents[1]
SAMPLES = REPOSITORY / "tests" / "data"  # a data folder: a few real images and lines of text

# By environment, not by jax.config: tests that need no JAX then never import it.
# Dtype promotion cannot be strict everywhere, optax's own Adam breaks under it: see strict_dtypes.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# What `make test` compiles runs for a moment only. Without XLA's fusion emitters compiling takes a
# fifth less time. An XLA that does not know the flag would abort, hence the version.
QUICK_FLAGS = ""
if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") and version("jaxlib").startswith("0.10."):
    QUICK_FLAGS = "--xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}".strip()
# Tests run in as many processes as there are cores; Torch's threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's kernels run on CPU tensors; it must be known before anything imports Triton.
os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("local", deadline=None, max_examples=20)
settings.register_profile("ci", deadline=None, max_examples=20, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def strict_dtypes():
    """Makes implicit dtype promotion in JAX an error for one test."""
    import jax

    with jax.numpy_dtype_promotion("strict"):
        yield


def golden_folder(name: str) -> Path:
    """The folder of the golden vectors called `name`: tests/golden, for all with random weights.

    Those with the authors' weights, `celo2_pretrained` and `celo`, are not part of this repository:
    `CELO2_GOLDEN` names their folder, or a folder beside the repository holds it; else the test is
    skipped.
    """
    ours = Path(__file__).resolve().parent / "golden"
    if (ours / f"{name}.npz").is_file():
        return ours
    return _optional_folder("CELO2_GOLDEN", "golden", f"{name}.npz")


def data_folder() -> Path:
    """The folder of the image sets, `CELO2_DATA` or beside the repository; else skips."""
    return _optional_folder("CELO2_DATA", "data", "mnist_8x8.npz")


def _optional_folder(variable: str, name: str, marker: str) -> Path:
    if given := os.environ.get(variable):
        if not (Path(given) / marker).is_file():
            raise FileNotFoundError(f"{variable}={given} holds no {marker}.")
        return Path(given)
    for found in sorted(REPOSITORY.parent.glob(f"*/{name}/{marker}")):
        return found.parent
    pytest.skip(f"no {name}/{marker} found; set {variable} to its folder", allow_module_level=True)


def run_python(code: str, devices: int = 8, timeout: float = 110) -> str:
    """What `code` prints in a process of its own, where JAX has `devices` CPU devices.

    Sharding tests go through here, so that all others keep a single device.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUMPY_")}
    environment["JAX_PLATFORMS"] = "cpu"
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices} {QUICK_FLAGS}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
