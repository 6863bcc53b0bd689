"""Checkpoints: what is in them, what damage does, and the number by which an array is known."""

import gc
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting_runs import array_files, counting, flip_bit, go, newest, of_kind
from jax.sharding import SingleDeviceSharding

from celo2.runs import checkpoint
from celo2.runs.checkpoint import digest_json, fingerprint
from celo2.runs.folder import RunRefused
from conftest import run_python

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint32", "uint8", "bool"]


def some_array(dtype, shape=(3, 5, 7)):
    numbers = np.random.default_rng(0).normal(size=shape) * 100
    return np.asarray(jnp.asarray(numbers).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 7), (11,), ()])
def test_host_and_devices_agree(monkeypatch, dtype, shape):
    array = some_array(dtype, shape)
    monkeypatch.setattr(checkpoint, "ON_HOST", 0)
    on_devices = fingerprint(jnp.asarray(array))
    monkeypatch.undo()
    assert fingerprint(array) == on_devices == fingerprint(jnp.asarray(array))


def test_wide_numbers_are_read_whole():
    array = np.arange(6, dtype=np.int64).reshape(2, 3)
    seen = {fingerprint(array + (1 << bit) * (array == 2)) for bit in range(62)}
    assert len(seen) == 62
    with jax.enable_x64(True):
        assert fingerprint(jnp.asarray(array)) == fingerprint(array)


def test_any_bit_of_any_element_shows():
    array = some_array("float32")
    seen = {fingerprint(array)}
    for place in (0, 17, array.size - 1):
        for bit in range(32):
            changed = array.copy()
            changed.view(np.uint32).reshape(-1)[place] ^= np.uint32(1 << bit)
            seen.add(fingerprint(changed))
    assert len(seen) == 1 + 3 * 32


def test_order_shape_and_dtype_show():
    array = some_array("float32")
    others = [array[::-1].copy(), array.reshape(5, 3, 7), array.view(np.int32), array[:2], -array]
    assert len({fingerprint(x) for x in [array, *others]}) == 6


def test_layout_on_devices_does_not_show_and_nothing_large_is_sent():
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import sys; sys.path.append("benchmarks")
from compiled import collectives
from celo2.runs import checkpoint as f
array = np.random.default_rng(0).normal(size=(8, 6, 4)).astype(np.float32)
mesh = jax.make_mesh((2, 2), ("a", "b"))
expected, f.ON_HOST = f.fingerprint(array), 0
for spec in (P(), P("a"), P("b", "a"), P(None, None, ("a", "b"))):
    parts = jax.device_put(array, NamedSharding(mesh, spec))
    assert f.fingerprint(parts) == expected
    sent = collectives(f._sums_on_devices.lower(parts).compile().as_text())
    assert all(one.name == "all-reduce" and one.elements <= 2 for one in sent)
"""
    run_python(code, devices=4)


@pytest.fixture
def quiet_damage():
    """Waits for what orbax's threads still say about a file they could not read."""
    yield
    time.sleep(0.2)
    gc.collect()


@pytest.fixture
def out(tmp_path):
    """A run with checkpoints at 4, 6 and 8."""
    go(tmp_path / "run", counting(total=8, periods=(2,)), checkpoint_every=2)
    return tmp_path / "run"


def test_newest_three_are_kept(out):
    assert checkpoint.list_iterations(out / "checkpoints") == [4, 6, 8]


def test_every_array_and_the_identity_are_in_a_checkpoint(out):
    found = newest(out)
    assert found.iteration == 8 and found.arrays.keys() == {"x", "key", "noise"}
    assert found.meta["config"] == {"a": 1} and found.meta["calls"] == 4


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
    path.write_text(json.dumps(meta | {"calls": 5}))
    found, damages = checkpoint.read_newest(out / "checkpoints")
    assert found is not None and found.iteration == 6
    assert damages == [(8, "its description does not match its SHA-256")]


def test_checkpoint_of_another_format_is_refused_and_left_in_its_place(out):
    path = out / "checkpoints" / "8" / "meta" / "metadata"
    meta = json.loads(path.read_text()) | {"format": 1, "version": "0.0.1"}
    del meta["seal"]
    path.write_text(json.dumps(meta | {"seal": digest_json(meta)}))
    with pytest.raises(RunRefused, match="in format 1, not 2: continue the run with celo2 0.0.1"):
        go(out, counting(total=8, periods=(2,)), resume=True)
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
        manager.wait_until_finished()
    place = SingleDeviceSharding(jax.devices()[0])
    abstract = {
        name: jax.ShapeDtypeStruct(a.shape, jnp.asarray(a).dtype, sharding=place)
        for name, a in state.items()
    }
    with pytest.raises(RunRefused, match=message):
        checkpoint.read_one(tmp_path, 1, abstract)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("quiet_damage")
@pytest.mark.parametrize("harm", ["flip", "cut", "missing"])
def test_damaged_checkpoint_is_told_put_aside_and_made_again(out, harm):
    good, file = newest(out).meta["digest"], array_files(out, 8)[-1]
    if harm == "flip":
        flip_bit(file, file.stat().st_size // 2)
    elif harm == "cut":
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
    assert [damage.iteration for damage in checkpoint.read_newest(out / "checkpoints")[1]] == [8]
    rows = go(out, counting(total=8, periods=(2,)), resume=True)
    assert rows[0]["step"] == 6
    assert "checkpoint of step 8 is damaged" in of_kind(rows, "warning")[0]["cause"]
    assert (out / "damaged" / "8").is_dir()
    assert newest(out).meta["digest"] == good


def test_run_without_a_whole_checkpoint_is_refused(out):
    for iteration in (4, 6, 8):
        (out / "checkpoints" / str(iteration) / "meta" / "metadata").write_text("{")
    with pytest.raises(RunRefused, match="No checkpoint in .* can be read: 8: "):
        go(out, counting(total=9, periods=(2,)), resume=True)


def test_newest_is_by_number_not_by_time(out):
    os.utime(out / "checkpoints" / "4")
    os.utime(out / "checkpoints" / "8", (0, 0))
    assert newest(out).iteration == 8


def test_unfinished_save_of_a_killed_process_is_cleared_away(out):
    left = out / "checkpoints" / "99.orbax-checkpoint-tmp"
    left.mkdir()
    assert newest(out).iteration == 8
    go(out, counting(total=9, periods=(2,)), resume=True)
    assert not left.exists()
