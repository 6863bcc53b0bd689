"""Newton–Schulz of a stack of layers, whole matrices on each of 8 devices."""

import functools
import json
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from celo2.evaluate.compiled import collectives
from celo2.jax import scale_by_celo2
from celo2.jax.spread import is_worth_spreading
from celo2.rule import Rule, RuleConfig, initial_weights
from conftest import run_python

LAYERS = 8
SHAPES = {"query": (32, 32), "up": (32, 64)}
SPECS = {"query": P("data", "model"), "up": P("model", "data")}
NARROW = RuleConfig(hidden=(3, 3), momentum_decays=(0.9,), factored_decays=(0.99,))
MATRICES = LAYERS * sum(a * b for a, b in SHAPES.values())


def values(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        f"block_{i}": {
            name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()
        }
        for i in range(LAYERS)
    }


def measure() -> None:
    """Prints the largest difference from one device, and the collectives with and without."""
    rule = Rule(NARROW, initial_weights(NARROW, np.random.default_rng(0)))
    tx = scale_by_celo2(rule)
    params, grads = values(0), values(1)
    expected, _ = tx.update(grads, tx.init(params), params)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {f"block_{i}": SPECS for i in range(LAYERS)}
    place = functools.partial(
        jax.tree.map, lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    )
    params, grads = place(params, specs), place(grads, specs)
    state = tx.init(params)
    facts: dict[str, Any] = {"small": is_worth_spreading(LAYERS)}
    for name in ("known", "unknown"):
        with jax.set_mesh(mesh) if name == "known" else nullcontext():
            jax.clear_caches()  # the mesh is no argument of the function
            places = jax.tree.map(lambda x: x.sharding, params)
            step = jax.jit(tx.update, out_shardings=(places, None))
            run = step.lower(grads, state, params).compile()
            updates, _ = run(grads, state, params)
        facts[name] = [list(sent) for sent in collectives(run.as_text())]
        differences = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), updates, expected)
        facts[f"{name} error"] = max(jax.tree.leaves(differences))
    with jax.set_mesh(mesh):
        facts["worth"] = [is_worth_spreading(n) for n in (1, 2, 4, 8)]
    print(json.dumps(facts))


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    code = "import sys; sys.path.insert(0, 'tests'); import test_jax_spread as t; t.measure()"
    return json.loads(run_python(code, timeout=300))


def test_spread_updates_equal_those_of_one_device(facts):
    assert facts["known error"] < 1e-3 and facts["unknown error"] < 1e-3


def test_whole_matrices_are_exchanged_and_never_gathered(facts):
    sent = {name for name, _, _, _ in facts["known"]}
    assert sent == {"all-reduce", "all-to-all"}
    exchanged = sum(times * size for name, times, size, _ in facts["known"] if name == "all-to-all")
    assert exchanged == 4 * 4 * MATRICES / 8  # twice there and twice back, a device's part each
    assert max(n for name, _, _, n in facts["known"] if name == "all-reduce") <= LAYERS * 64
    assert "all-gather" in {name for name, _, _, _ in facts["unknown"]}  # the counterpart


def test_only_a_known_mesh_that_is_kept_busy_is_used(facts):
    assert not facts["small"]  # no mesh was set
    assert facts["worth"] == [False, True, True, True]
