import gc
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from tiny_runs import array_files, digest, flip_bit, newest, of_kind, run, shared_programs, tiny

from celo2.metatrain import status
from celo2.runs import checkpoint
from celo2.runs.checkpoint import digest_json
from celo2.runs.folder import RunRefused

pytestmark = pytest.mark.usefixtures("shared_programs")
__all__ = ["shared_programs"]


@pytest.fixture
def quiet_damage():
    """Waits for what orbax's threads still say about a file they could not read."""
    yield
    time.sleep(0.2)
    gc.collect()


@pytest.fixture
def out(tmp_path):
    """A run with checkpoints at 4, 6 and 8."""
    run(tmp_path / "run", tiny(iterations=8), checkpoint_every=2)
    return tmp_path / "run"


def test_newest_three_are_kept(out):
    assert checkpoint.list_iterations(out / "checkpoints") == [4, 6, 8]


def test_every_array_and_the_identity_are_in_a_checkpoint(out):
    found = newest(out)
    assert found.iteration == 8 and int(found.arrays["iteration"]) == 8
    for name in (
        "weights.w0",
        "outer.0.mu.w0",
        "problems.0.perturbation.b1",
        "problems.0.problems.step",
    ):
        assert name in found.arrays
    assert found.meta["config"]["problems"] == 4
    assert list(found.meta["data"]) == ["digits"]


def test_flipped_bits_are_noticed_wherever_they_are(out):
    file = array_files(out, 8)[-1]
    whole = file.read_bytes()
    for position in range(len(whole) // 7, len(whole), len(whole) // 5):
        flip_bit(file, position)
        assert newest(out).iteration == 6
        file.write_bytes(whole)
    assert newest(out).iteration == 8


def test_edited_description_is_noticed(out):
    path = out / "checkpoints" / "8" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"elapsed": 0.5}))
    found, damages = checkpoint.read_newest(out / "checkpoints")
    assert found is not None and found.iteration == 6
    assert damages == [(8, "its description does not match its SHA-256")]


def test_checkpoint_of_another_format_is_refused_and_left_in_its_place(out):
    path = out / "checkpoints" / "8" / "meta" / "metadata"
    meta = json.loads(path.read_text()) | {"format": 1, "version": "0.0.1"}
    del meta["seal"]
    path.write_text(json.dumps(meta | {"seal": digest_json(meta)}))
    with pytest.raises(RunRefused, match="in format 1, not 2: continue the run with celo2 0.0.1"):
        run(out, tiny(iterations=8), resume=True)
    assert checkpoint.list_iterations(out / "checkpoints") == [4, 6, 8]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": np.zeros(3), "b": np.zeros(2)}, r"a is float32\(4,\), not float32\(3,\)"),
        ({"a": np.zeros(4)}, "another version of celo2: b"),
        ({"a": np.zeros(4, np.int32), "b": np.zeros(2)}, r"a is float32\(4,\), not int32"),
    ],
)
def test_checkpoint_of_another_state_is_refused_by_the_arrays_that_differ(tmp_path, state, message):
    with checkpoint.open_manager(tmp_path) as manager:
        whole = {"a": jnp.zeros(4), "b": jnp.zeros(2)}
        checkpoint.save(manager, 1, whole, {"config": {}, "data": {}})
        checkpoint.finish(manager)
    place = SingleDeviceSharding(jax.devices()[0])
    abstract = {
        name: jax.ShapeDtypeStruct(a.shape, jnp.asarray(a).dtype, sharding=place)
        for name, a in state.items()
    }
    with pytest.raises(RunRefused, match=message):
        checkpoint.read_parts(tmp_path, 1, abstract)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("quiet_damage")
@pytest.mark.parametrize("harm", ["flip", "cut", "missing"])
def test_damaged_checkpoint_is_told_put_aside_and_made_again(out, harm):
    good, file = digest(out), array_files(out, 8)[-1]
    if harm == "flip":
        flip_bit(file, file.stat().st_size // 2)
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
    assert list(status(out)["damaged"]) == ["8"]
    rows = run(out, tiny(iterations=8), resume=True)
    assert rows[0]["iteration"] == 6
    assert "checkpoint of iteration 8 is damaged" in of_kind(rows, "warning")[0]["cause"]
    assert (out / "damaged" / "8").is_dir()
    assert digest(out) == good


def test_run_without_a_whole_checkpoint_is_refused(out):
    for iteration in (4, 6, 8):
        (out / "checkpoints" / str(iteration) / "meta" / "metadata").write_text("{")
    with pytest.raises(RunRefused, match="No checkpoint in .* can be read: 8: "):
        run(out, tiny(iterations=9), resume=True)


def test_newest_is_by_number_not_by_time(out):
    os.utime(out / "checkpoints" / "4")
    os.utime(out / "checkpoints" / "8", (0, 0))
    assert newest(out).iteration == 8


def test_unfinished_save_of_a_killed_process_is_cleared_away(out):
    left = out / "checkpoints" / "99.orbax-checkpoint-tmp"
    left.mkdir()
    assert newest(out).iteration == 8
    run(out, tiny(iterations=9), resume=True)
    assert not left.exists()
