"""Runs on several devices: the losses of one, the state in parts, resumed on another number."""

import time
from contextlib import ExitStack

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from small_runs import of_kind

from celo2 import cli
from celo2.evaluate.sharding import check_batch, leaf_spec, place_arrays
from celo2.rulefile import save
from celo2.runs import records
from celo2.runs.checkpoint import list_iterations
from celo2.runs.processes import make_mesh, parse_mesh
from conftest import run_python
from processes import run_processes, start_processes
from small import SMALL, make_rule

# Tiny language models, because their layers are cut along both axes. One block compiles sooner.
ONE_BLOCK = "small_runs:one_block"
RUN = ["run", "text-tiny", "--batch", "8", "--evaluation-batches", "2", "--record-every", "2"]
RUN += ["--evaluate-every", "4", "--learning-rate", "2e-3"]
ON_MESH = """
import sys
sys.path.append("tests/evaluate")
from celo2.evaluate import RunConfig, run
from celo2.runs.processes import make_mesh
for optimizer in {optimizers}:
    config = RunConfig("{task}", optimizer, learning_rate=2e-3, steps=4, batch=8,
                       evaluation_batches=2, record_every=2, evaluate_every=4,
                       accumulate={accumulate})
    for name, sizes in {meshes}.items():
        mesh = make_mesh(sizes) if sizes else None
        list(run(config, "{out}/" + optimizer.split("/")[-1] + "-" + name, mesh=mesh))
"""
EIGHT = {"one": None, "eight": {"data": 4, "model": 2}}


def losses(folder) -> np.ndarray:
    rows = of_kind(records.read(folder / "records.jsonl"), "train", "valid")
    return np.array([row["metrics"]["loss"] for row in rows])


def compare_on_mesh(tmp_path, optimizers, **changes):
    options = {"task": "text-tiny", "accumulate": 1} | changes
    code = ON_MESH.format(optimizers=optimizers, meshes=EIGHT, out=tmp_path, **options)
    run_python(code, devices=8, timeout=600)
    for name in optimizers:
        folder = name.split("/")[-1]
        eight, one = (losses(tmp_path / f"{folder}-{mesh}") for mesh in ("eight", "one"))
        assert len(one) == 4 and one[-1] < one[1]
        np.testing.assert_allclose(eight, one, rtol=2e-5)


def test_eight_devices_train_to_the_losses_of_one(tmp_path):
    save(make_rule(SMALL), tmp_path / "small.safetensors")
    compare_on_mesh(tmp_path, [str(tmp_path / "small.safetensors")], task=ONE_BLOCK)


@pytest.mark.slow
def test_eight_devices_train_to_the_losses_of_one_with_all_optimizers(tmp_path):
    compare_on_mesh(tmp_path, ["adamw", "celo2", "celo2-base", "muon"])
    compare_on_mesh(tmp_path / "parts", ["celo2"], accumulate=2)


@pytest.mark.parametrize(
    "optimizer",
    ["adamw", *(pytest.param(n, marks=pytest.mark.slow) for n in ("celo2", "celo2-base", "muon"))],
)
def test_two_processes_train_to_the_losses_of_one(tmp_path, optimizer):
    options = [*RUN, "--optimizer", optimizer, "--steps", "4"]
    run_processes(2, [*options, "--out", str(tmp_path / "two"), "--mesh", "data=2,model=2"])
    assert cli.main([*options, "--out", str(tmp_path / "one")]) == 0
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=2e-5)


def steps_made(folder) -> int:
    return max((row["step"] for row in records.read(folder / "records.jsonl")), default=0)


@pytest.mark.slow
def test_lost_process_ends_the_run_which_resumes_on_other_devices(tmp_path):
    options = [*RUN, "--optimizer", "adamw", "--steps", "60", "--out", str(tmp_path)]
    with ExitStack() as stack:
        first, second = start_processes(stack, 2, [*options, "--checkpoint-every", "20"])
        # Between two checkpoints: in the middle of one, JAX's heartbeat is what ends the first.
        while steps_made(tmp_path) < max(list_iterations(tmp_path / "checkpoints"), default=99) + 2:
            assert first.poll() is None and second.poll() is None
            time.sleep(0.05)
        second.kill()
        message = first.communicate(timeout=200)[1]
    assert first.returncode != 0
    assert "another process of this run was lost" in message and "--resume" in message
    command = [*options, "--resume", "--mesh", "data=4,model=2"]
    run_python(f"from celo2 import cli; raise SystemExit(cli.main({command!r}))", timeout=200)
    rows = records.read(tmp_path / "records.jsonl")
    assert of_kind(rows, "resume")[0]["hardware"]["devices"] == 8
    assert [row["step"] for row in of_kind(rows, "train")] == list(range(2, 61, 2))
    assert rows[-1]["kind"] == "end" and rows[-1]["score"] < 3


def test_arrays_without_a_mesh_are_on_the_default_device():
    placed = place_arrays({"x": np.ones(3, np.uint8), "none": None}, None)
    assert isinstance(placed["x"], jax.Array) and placed["x"].dtype == np.uint8
    assert placed["x"].devices() == {jax.devices()[0]} and placed["none"] is None


def test_mesh_is_read_and_refused_by_name():
    assert parse_mesh("model=2") == {"data": 1, "model": 2}
    for wrong in ("data", "data=0", "rows=2", "data=x", ""):
        with pytest.raises(ValueError, match="not of the form data=4,model=2"):
            parse_mesh(wrong)


def test_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="has 3 places, and there are 1 devices"):
        make_mesh({"data": 3})
    four = AbstractMesh((4, 1), ("data", "model"))
    with pytest.raises(ValueError, match="batch=6 in 1 parts cannot be shared by 4 devices"):
        check_batch(6, 1, four)
    check_batch(8, 2, four)


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("blocks/block_0/attention/q/kernel", (64, 64), P("data", "model")),
        ("blocks/block_0/attention/o/kernel", (64, 64), P("model", "data")),
        ("blocks/block_0/mlp/down/kernel", (256, 64), P("model", "data")),
        ("embed/table", (256, 64), P("model", "data")),
        ("head/kernel", (64, 64), P(None, "data")),
        ("head/kernel", (64, 10), P("data", None)),
        ("head/kernel", (9, 10), P(None, None)),
        ("stem/kernel", (3, 3, 8, 64), P(None, None, None, "data")),
        ("norm/scale", (64,), P()),
    ],
)
def test_parameter_is_cut_where_its_layer_and_its_sides_allow(path, shape, spec):
    assert leaf_spec(path, shape, {"data": 4, "model": 2}) == spec
