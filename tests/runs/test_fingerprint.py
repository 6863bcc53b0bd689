"""The number by which an array is known, on the host and on devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from celo2.runs import checkpoint as fingerprints
from celo2.runs.checkpoint import fingerprint
from conftest import run_python

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint32", "uint8", "bool"]


def some_array(dtype, shape=(3, 5, 7)):
    numbers = np.random.default_rng(0).normal(size=shape) * 100
    return np.asarray(jnp.asarray(numbers).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 7), (11,), ()])
def test_host_and_devices_agree(monkeypatch, dtype, shape):
    array = some_array(dtype, shape)
    monkeypatch.setattr(fingerprints, "HOST", 0)
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
from celo2.evaluate.compiled import collectives
from celo2.runs import checkpoint as f
array = np.random.default_rng(0).normal(size=(8, 6, 4)).astype(np.float32)
mesh = jax.make_mesh((2, 2), ("a", "b"))
expected, f.HOST = f.fingerprint(array), 0
for spec in (P(), P("a"), P("b", "a"), P(None, None, ("a", "b"))):
    parts = jax.device_put(array, NamedSharding(mesh, spec))
    assert f.fingerprint(parts) == expected
    sent = collectives(f._on_devices.lower(parts).compile().as_text())
    assert all(one.name == "all-reduce" and one.elements <= 2 for one in sent)
"""
    run_python(code, devices=4)
