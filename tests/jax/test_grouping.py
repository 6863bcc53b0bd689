"""Loops over tensors of one shape, and Newton–Schulz with whole matrices on each of 8 devices."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import collectives
from jax import export
from jax.experimental.serialize_executable import serialize
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from celo2.jax import grouping, scale_by_celo2
from celo2.rule import Rule, RuleConfig, initial_weights
from conftest import run_python
from rules import jit, make_rule, normal_tree


def double_and_sum(static, job):
    return static * job["x"], jnp.sum(job["y"])


def in_loops(function, jobs, roles=None):
    def group(static, members):
        return grouping.for_each(functools.partial(function, static), members)

    return grouping.for_each_group(group, jobs, roles or ["role"] * len(jobs))


def jobs():
    shapes = [(2, 3), (4,), (2, 3), (2, 3), (4,), (5,)]
    arrays = [
        jnp.arange(np.prod(s), dtype=jnp.float32).reshape(s) + i for i, s in enumerate(shapes)
    ]
    return [(2.0, {"x": x, "y": x + 1}) for x in arrays]


def test_loops_give_what_separate_calls_give():
    found = in_loops(double_and_sum, jobs())
    for (static, job), result in zip(jobs(), found, strict=True):
        jax.tree.map(np.testing.assert_array_equal, result, double_and_sum(static, job))


def test_loop_for_other_platforms_gives_the_same():
    members = [job for _, job in jobs() if job["x"].shape == (2, 3)]
    double = functools.partial(double_and_sum, 2.0)
    stacked = grouping._loop_over_stack(double, members)
    for member, result in zip(members, grouping.unstack(stacked, 3), strict=True):
        jax.tree.map(np.testing.assert_array_equal, result, double(member))


def test_platform_of_the_program_decides_not_that_of_the_process():
    def step(first, second):
        return in_loops(lambda _, x: 2 * x, [(None, first), (None, second)])

    x = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    cpu, gpu = (
        export.export(jax.jit(step), platforms=[platform])(x, x).mlir_module()
        for platform in ("cpu", "cuda")
    )
    # Only a CPU picks each member where it is.
    assert "stablehlo.concatenate" in gpu and "stablehlo.concatenate" not in cpu


def test_one_body_is_traced_for_each_shape():
    calls = []

    def counted(static, job):
        calls.append(job["x"].shape)
        return double_and_sum(static, job)

    jax.make_jaxpr(lambda: in_loops(counted, jobs()))()
    assert sorted(set(calls)) == sorted(calls)


def test_jobs_with_other_constants_are_kept_apart():
    first, second = jobs()[0], (3.0, jobs()[0][1])
    found = in_loops(double_and_sum, [first, second])
    np.testing.assert_array_equal(found[1][0], 3.0 * first[1]["x"])


def test_program_grows_with_the_number_of_shapes_not_of_tensors():
    """Four times as many tensors of a shape make three times the program without groups."""
    tx = scale_by_celo2(make_rule())

    def size(count: int) -> int:
        params = {f"block_{i}": jax.ShapeDtypeStruct((8, 16), jnp.float32) for i in range(count)}
        state = jax.eval_shape(tx.init, params)
        return len(serialize(jax.jit(tx.update).lower(params, state, params).compile())[0])

    assert size(8) < 2 * size(2)


def test_groups_change_no_number(monkeypatch):
    """Also of the gradient with respect to the rule's weights, as meta-training may want it."""
    shapes = {f"block_{i}": (4, 6) for i in range(3)} | {"other": (6, 4)}
    params, grads = normal_tree(shapes, 0), normal_tree(shapes, 1)
    rule = make_rule()

    def updates(weights):
        tx = scale_by_celo2(Rule(rule.config, weights))
        return tx.update(grads, tx.init(params), params)[0]

    def slope(weights):
        return jax.grad(lambda w: sum(jnp.sum(jnp.sin(u)) for u in updates(w).values()))(weights)

    weights = {name: jnp.asarray(w) for name, w in rule.weights.items()}
    grouped, grouped_slope = jit(updates)(weights), jit(slope)(weights)
    monkeypatch.setattr(
        "celo2.jax.optimizer.for_each", lambda function, members: list(map(function, members))
    )
    plain, plain_slope = jit(lambda w: updates(w))(weights), jit(lambda w: slope(w))(weights)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), grouped, plain)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4),
        grouped_slope,
        plain_slope,
    )


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
    """Prints the largest difference from one device, and what is sent with and without."""
    from celo2.jax import optimizer

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
    shardings = jax.tree.map(lambda x: x.sharding, params)
    facts: dict[str, Any] = {}
    for name in ("redistributed", "in place"):
        if name == "in place":
            optimizer.is_worth_redistributing = lambda mesh, count: False
        jax.clear_caches()
        step = jax.jit(tx.update, out_shardings=(shardings, None))
        run = step.lower(grads, state, params).compile()
        updates, _ = run(grads, state, params)
        differences = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), updates, expected)
        sent = collectives(run.as_text())
        facts[name] = {
            "error": max(jax.tree.leaves(differences)),
            "bytes": sum(times * size for _, times, size, _ in sent),
            "gathered": sum(times * size for kind, times, size, _ in sent if kind == "all-gather"),
        }
    print(json.dumps(facts))


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    path = "import sys; sys.path[:0] = ['tests', 'tests/jax', 'benchmarks']"
    code = f"{path}\nimport test_grouping as t; t.measure()"
    return json.loads(run_python(code, timeout=300))


@pytest.mark.parametrize("way", ["redistributed", "in place"])
def test_updates_on_a_mesh_equal_those_of_one_device(facts, way):
    assert facts[way]["error"] < 1e-3


def test_redistribution_sends_each_matrix_there_and_back_and_gathers_nothing(facts):
    found = facts["redistributed"]
    exchange = 4 * 4 * MATRICES / 8  # two axes, there and back: a device's part each time
    assert found["gathered"] == 0
    assert exchange <= found["bytes"] < 1.5 * exchange
    assert found["bytes"] < facts["in place"]["bytes"] / 3


@pytest.mark.parametrize(
    ("kind", "sizes", "count", "worth"),
    [
        (AxisType.Auto, (4, 2), 1, False),
        (AxisType.Auto, (4, 2), 2, True),
        (AxisType.Auto, (4, 2), 8, True),
        (AxisType.Auto, (16, 2), 7, False),
        (AxisType.Auto, (2, 1), 1, False),
        (AxisType.Auto, (1, 1), 8, False),
        (AxisType.Explicit, (4, 2), 8, False),
    ],
)
def test_only_a_mesh_that_is_kept_busy_is_worth_it(kind, sizes, count, worth):
    mesh = jax.sharding.AbstractMesh(sizes, ("data", "model"), axis_types=(kind, kind))
    assert grouping.is_worth_redistributing(mesh, count) == worth


def test_nothing_is_redistributed_without_a_mesh():
    mesh = grouping.mesh_of([jnp.ones((2, 3))])
    assert mesh.empty and not grouping.is_worth_redistributing(mesh, 8)
