"""The update against the authors' vectors, the float64 reference and finite differences."""

import dataclasses
import functools
import json
import re
import time
from pathlib import Path
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import reference
import reference_parts
from celo2.jax import celo2, scale_by_celo2
from celo2.jax.moments import init_moments, update_moments
from celo2.jax.update import cancellation, newton_schulz
from celo2.routing import MatrixView, axes_of, default_view
from celo2.rule import (
    CANCELLATION_LIMIT,
    CELO2,
    Form,
    Norm,
    Rule,
    RuleConfig,
    initial_weights,
)
from conftest import golden_folder, run_python
from rules import GATED, SMALL, jit, make_rule, normal_tree
from test_reference import GOLDEN, golden_config, golden_weights

OFF = {"skip_nonfinite": False, "hold_unused": False}


class Leaf(NamedTuple):
    """A parameter of the parity tree; `wish` is what the user asks for, `view` what is meant."""

    shape: tuple[int, ...]
    view: MatrixView
    wish: object = None


# Many are 4×12 or (2, 6, 4) once viewed: they share a compiled loop.
LEAVES = {
    "scalar": Leaf((), default_view(0)),
    "vector": Leaf((7,), default_view(1)),
    "layers/bias": Leaf((3, 7), MatrixView((0,), (), (1,))),
    "row": Leaf((1, 9), default_view(2)),
    "column": Leaf((9, 1), default_view(2)),
    "square": Leaf((5, 5), default_view(2)),
    "wide": Leaf((4, 12), default_view(2)),
    "attention/query/kernel": Leaf((4, 3, 4), MatrixView((), (0,), (1, 2))),
    "attention/out/kernel": Leaf((2, 2, 12), MatrixView((), (0, 1), (2,))),
    "conv_1d": Leaf((2, 2, 12), MatrixView((), (0, 1), (2,))),
    "four_axes": Leaf((2, 1, 2, 12), MatrixView((), (0, 1, 2), (3,))),
    "five_axes": Leaf((1, 2, 1, 2, 12), MatrixView((), (0, 1, 2, 3), (4,))),
    "muon": Leaf((12, 4), MatrixView((), (1,), (0,)), optax.contrib.MuonDimensionNumbers(1, 0)),
    "experts": Leaf((2, 6, 4), default_view(3)),
    "muon_stack": Leaf(
        (4, 2, 6), MatrixView((1,), (2,), (0,)), optax.contrib.MuonDimensionNumbers(-1, (0,))
    ),
    "folded_stack": Leaf(
        (6, 2, 1, 4), MatrixView((1,), (0,), (2, 3)), MatrixView((1,), (0,), (2, 3))
    ),
    "vectors": Leaf((7, 3), MatrixView((1,), (), (0,)), MatrixView((1,), (), (0,))),
}
OVERRIDES = {f"^{name}$": leaf.wish for name, leaf in LEAVES.items() if leaf.wish is not None}
RANKS = ("scalar", "vector", "wide", "experts", "four_axes", "five_axes")
BAD_ENTRIES = {
    "experts": (0, 1, 2),
    "four_axes": (1, 0, 1, 2),
    "muon": (0, 0),
    "layers/bias": (2, 1),
}
STEPS = 4


def draw(shapes: dict, seed: int = 0) -> tuple[list, list]:
    """Parameters and gradients of a few steps, with gradients that are late, bad, small, large."""
    rng = np.random.default_rng(seed)

    def tree(scale):
        return {k: np.float32(scale * rng.normal(size=shape)) for k, shape in shapes.items()}

    params = [tree(0.3) for _ in range(STEPS)]
    grads = [tree(scale) for scale in (1.0, 1e-3, 30.0, 0.1)]
    for name in ("square", "vector"):
        if name in shapes:
            grads[0][name][:] = 0  # starts a step late
    if "experts" in shapes:
        grads[0]["experts"][1] = 0  # one slice does
    for name, entry in BAD_ENTRIES.items():
        if name in shapes:
            grads[2][name][entry] = -np.inf  # loses a step
    return params, grads


def reference_run(config, weights, leaf: Leaf, params, grads, **policies):
    """The reference's updates of one stored tensor, and its moments in the end.

    Of a batch of vectors the moments are None: the reference takes them one by one.
    """
    if leaf.view.is_vector and leaf.view.batch:
        (axis,) = leaf.view.batch
        vector = Leaf((), default_view(1))
        updates = [
            reference_run(
                config,
                weights,
                vector,
                [p.take(i, axis) for p in params],
                [g.take(i, axis) for g in grads],
                **policies,
            )[0]
            for i in range(leaf.shape[axis])
        ]
        return [np.stack(parts, axis) for parts in zip(*updates, strict=True)], None
    views = [[reference_parts.view(x, leaf.view) for x in xs] for xs in (params, grads)]
    moments = reference.init(config, views[1][0].shape)
    updates = []
    for param, grad in zip(*views, strict=True):
        update, moments = reference.step(config, weights, param, grad, moments, **policies)
        updates.append(reference_parts.unview(update, leaf.view, params[0].shape))
    return updates, moments


def check_parity(config: RuleConfig, leaves: dict[str, Leaf], atol: float, **policies):
    """Holds updates and state of the transform to the reference, leaf by leaf."""
    rule = make_rule(config)
    overrides = {k: v for k, v in OVERRIDES.items() if k.strip("^$") in leaves}
    tx = scale_by_celo2(rule, overrides=overrides, **policies)
    params, grads = draw({name: leaf.shape for name, leaf in leaves.items()})
    update = jit(tx.update)
    state = jit(tx.init)(params[0])
    updates = []
    for param, grad in zip(params, grads, strict=True):
        step, state = update(grad, state, param)
        updates.append(step)

    hold, skip = policies.get("hold_unused", True), policies.get("skip_nonfinite", True)
    for name, leaf in leaves.items():
        expected, moments = reference_run(
            config,
            rule.weights,
            leaf,
            [tree[name] for tree in params],
            [tree[name] for tree in grads],
            hold=hold,
            skip_nonfinite=skip,
        )
        ours = np.stack([tree[name] for tree in updates])
        np.testing.assert_allclose(ours, expected, rtol=atol, atol=atol, err_msg=name)
        if moments is not None:
            check_state(state, moments, name, leaf, config.norm.startswith("rolling"))


def check_state(state, moments, name: str, leaf: Leaf, rolling: bool):
    """The state's arrays keep reduced axes; otherwise they are the reference's moments."""
    stored = {
        "momentum": [reference_parts.view(np.asarray(m[name]), leaf.view) for m in state.momentum],
        "rms": [reference_parts.view(np.asarray(state.rms[name]), leaf.view)],
        "rows": list(state.rows[name]),
        "moved": [state.moves[name]],
    }
    if not leaf.view.is_vector:
        stored["cols"] = list(state.cols[name])
    if rolling:
        stored["running_rms"] = [state.running_rms[name]]
    for field, ours in stored.items():
        theirs = getattr(moments, field)
        for x, y in zip(ours, theirs if isinstance(theirs, list) else [theirs], strict=True):
            np.testing.assert_allclose(
                np.reshape(x, y.shape),
                y,
                rtol=1e-4,
                atol=1e-5 * np.abs(y).max(),
                err_msg=f"{name} {field}",
            )


@pytest.mark.parametrize("norm", get_args(Norm))
@pytest.mark.parametrize("form", get_args(Form))
def test_every_form_norm_and_rank_equals_the_reference(form, norm):
    config = dataclasses.replace(SMALL, form=form, norm=norm)
    check_parity(config, {name: LEAVES[name] for name in RANKS}, atol=2e-4)


@pytest.mark.parametrize(("orthogonalize", "policies"), [(True, {}), (False, OFF)])
def test_every_view_equals_the_reference(orthogonalize, policies):
    config = dataclasses.replace(SMALL, orthogonalize=orthogonalize, norm="rolling_norm")
    check_parity(config, LEAVES, atol=2e-4 if orthogonalize else 2e-5, **policies)


@pytest.mark.parametrize(("orthogonalize", "policies"), [(True, {}), (False, OFF)])
def test_gated_rule_equals_the_reference(orthogonalize, policies):
    config = dataclasses.replace(GATED, orthogonalize=orthogonalize)
    check_parity(config, LEAVES, atol=2e-4 if orthogonalize else 2e-5, **policies)


def test_cancellation_is_zero_for_independent_gradients_and_grows_where_they_alternate():
    rng = np.random.default_rng(0)
    steps, shape = 60, (40, 30)
    noise = rng.normal(size=(steps, *shape))
    signs = (-1.0) ** np.arange(steps)[:, None, None]
    gradients = {
        "equal": np.broadcast_to(noise[0], noise.shape),
        "independent": noise,
        "alternating": 0.5 * noise + signs * noise[0],
    }
    axes = axes_of(default_view(2), shape)
    found = {}
    for kind, series in gradients.items():
        moments = init_moments(CELO2, axes, jnp.zeros(shape))
        for grad in series:
            moments, _ = update_moments(CELO2, axes, jnp.float32(grad), moments)
        found[kind] = float(cancellation(CELO2, moments).item())
    assert found["equal"] == 0.0
    assert found["independent"] < 0.15
    assert 0.8 < found["alternating"] < CANCELLATION_LIMIT


@pytest.mark.parametrize("shape", [(30, 30), (12, 40), (40, 12)], ids=str)
def test_overshoot_keeps_directions_and_favours_small_singular_values(shape):
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, min(shape))))[0] for n in shape)
    values = np.linspace(1.0, 0.02, min(shape))
    x = jnp.float32((left * values) @ right.T)
    found = np.asarray(newton_schulz(x, jnp.full((1, 1), 0.5)), np.float64)
    rotated = left.T @ found @ right
    np.testing.assert_allclose(rotated, np.diag(np.diag(rotated)), atol=1e-4)
    pushed = np.diag(rotated)
    assert pushed.min() > 0.1
    large, small = values > 0.3, values < 0.05
    assert pushed[small].mean() > 1.2 * pushed[large].mean()


@pytest.mark.parametrize(
    "config",
    [
        CELO2,
        RuleConfig((4,), momentum_decays=(0.5,), factored_decays=(0.0,), rms_decay=0.999),
        RuleConfig((16, 16, 16), momentum_decays=(0.9,), factored_decays=(0.9,)),
        RuleConfig((4, 2), momentum_decays=(0.9, 0.99), factored_decays=(0.8, 0.9)),
        RuleConfig((4,), momentum_decays=(0, 0.5, 0.9, 0.99), factored_decays=(0.9,) * 4),
    ],
    ids=lambda config: f"{config.hidden}, {len(config.momentum_decays)} decays",
)
def test_every_size_of_rule_equals_the_reference(config):
    check_parity(config, {name: LEAVES[name] for name in ("vector", "wide")}, atol=2e-4)


@pytest.mark.parametrize("name", GOLDEN)
def test_update_equals_the_published_implementation(name):
    folder = golden_folder(name)
    golden = json.loads((folder / "golden.json").read_text())["configs"][name]
    config = golden_config(golden["settings"])
    with np.load(folder / golden["file"]) as arrays:
        weights = golden_weights(arrays)
        params, grads, expected = (
            {leaf: arrays[f"{kind}/{leaf}"] for leaf in golden["leaves"]}
            for kind in ("params", "grads", "updates_f64")
        )
        state = jit(scale_by_celo2(Rule(config, weights), published=True).init)(at(params, 0))
        for t in range(len(next(iter(grads.values())))):
            updates, state = published_update(config, weights, at(grads, t), state, at(params, t))
            for leaf, update in updates.items():
                np.testing.assert_allclose(
                    golden["settings"]["rmsmult"] * update,
                    expected[leaf][t],
                    rtol=0,
                    atol=1e-4 if config.orthogonalize else 1e-5,
                    err_msg=f"{leaf}, step {t}",
                )
        for leaf in golden["leaves"]:
            check_golden_state(state, arrays, leaf)


@functools.partial(jit, static_argnums=0)
def published_update(config, weights, grads, state, params):
    """One step; rules of one config share the compiled program."""
    return scale_by_celo2(Rule(config, weights), published=True).update(grads, state, params)


def at(trees: dict, t: int) -> dict:
    return {name: x[t] for name, x in trees.items()}


def check_golden_state(state, arrays, leaf):
    """The published arrays have the decays last and lack the reduced axes."""
    vector = state.rms[leaf].ndim < 2
    ours = {
        "m": [tree[leaf] for tree in state.momentum],
        "rms": [state.rms[leaf]],
        "v_diag" if vector else "v_row": list(state.rows[leaf]),
    }
    for name, planes in (ours if vector else ours | {"v_col": list(state.cols[leaf])}).items():
        stored = arrays[f"state/{name}/{leaf}"]
        np.testing.assert_allclose(
            np.stack([np.reshape(plane, stored.shape[:-1]) for plane in planes], axis=-1),
            stored,
            rtol=1e-6,
            atol=1e-6 * np.abs(stored).max(),
            err_msg=f"{leaf} {name}",
        )
    assert state.count == arrays["state/iteration"]


RULE = make_rule()
SHAPES = {"kernel": (4, 6), "bias": (6,)}
PARAMS = normal_tree(SHAPES, seed=1, scale=0.3)
GRADS = normal_tree({name: (3, *shape) for name, shape in SHAPES.items()}, seed=2, scale=0.1)


def test_gradient_with_respect_to_the_rule_s_weights_is_right():
    weights = jax.tree.map(jnp.asarray, dict(RULE.weights))

    def loss(weights):
        tx = celo2(0.1, rule=Rule(SMALL, weights))

        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (jax.tree.map(jnp.add, params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), GRADS)
        return jnp.sum(jnp.sin(params["kernel"]))

    gradient = jit(jax.grad(loss))(weights)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    assert all(gradient[name].any() for name in ("w0", "b0", "w1", "b1"))
    value = jit(loss)
    direction = normal_tree(jax.tree.map(jnp.shape, weights), seed=9)

    def along(distance):
        return value(jax.tree.map(lambda w, d: w + distance * d, weights, direction))

    expected = sum(jnp.sum(gradient[k] * direction[k]) for k in weights)
    assert (along(1e-3) - along(-1e-3)) / 2e-3 == pytest.approx(float(expected), rel=0.05)


def test_rule_that_starts_at_momentum_orthogonalizes_the_momentum():
    rule = Rule(CELO2, initial_weights(CELO2, np.random.default_rng(0), "momentum"))
    tx, shapes = scale_by_celo2(rule), {"kernel": (6, 4)}
    params, first, second = (normal_tree(shapes, seed) for seed in range(3))

    @jit
    def second_update():
        _, state = tx.update(first, tx.init(params), params)
        return tx.update(second, state, params)[0]["kernel"]

    expected = newton_schulz(0.9 * first["kernel"] + second["kernel"])
    expected /= jnp.sqrt(jnp.mean(jnp.square(expected)))
    np.testing.assert_allclose(second_update(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("orthogonalize", [False, True])
def test_both_kernels_agree(orthogonalize):
    """Units as planes, and layers as products; meta-training runs either under vmap."""
    config = dataclasses.replace(
        SMALL,
        hidden=(3, 4),
        orthogonalize=orthogonalize,
        norm="raw",
        form="d_exp_m",
        vectors="rule",
    )
    shapes = {"wide": (5, 8), "tall": (8, 5), "stack": (3, 4, 6), "vector": (7,)}
    trees = [
        (dict(make_rule(config, seed).weights), normal_tree(shapes, 2), normal_tree(shapes, 3))
        for seed in (0, 1)
    ]

    def updates(kernel, weights, params, grads):
        tx = scale_by_celo2(Rule(config, weights), kernel=kernel)
        return tx.update(grads, tx.init(params), params)[0]

    def close(x, y):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), x, y)

    found = []
    for kernel in ("fused", "products"):
        update_one = functools.partial(updates, kernel)
        both = jit(jax.vmap(update_one))(*jax.tree.map(lambda *x: jnp.stack(x), *trees))
        close(jax.tree.map(lambda x: x[0], both), jit(update_one)(*trees[0]))
        found.append(both)
    close(*found)


def test_unknown_kernel_is_named():
    with pytest.raises(ValueError, match="kernel='triton' is not one of fused, products"):
        scale_by_celo2(kernel="triton")


def compile_cost(hidden: int, orthogonalize: bool, meta: bool) -> tuple[float, float]:
    """CPU seconds to trace and compile a rule's update, and this process's peak memory in GB."""
    config = RuleConfig(hidden=(hidden, hidden), orthogonalize=orthogonalize, vectors="rule")
    weights = initial_weights(config, np.random.default_rng(0))
    shapes = {"matrix": (64, 48), "vector": (64,), "short": (7,)}
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}

    def step(weights, grads, params):
        tx = scale_by_celo2(Rule(config, weights))
        state = tx.init(params)
        return tx.update(grads, state, params)[0]

    def unroll(weights, grads, params):
        def body(params, _):
            steps = step(weights, grads, params)
            return jax.tree.map(jnp.add, params, steps), None

        return jax.lax.scan(body, params, None, length=3)[0]

    arguments = (weights, params, params)
    function = step
    if meta:  # two problems, each with weights of its own
        function = jax.vmap(unroll)
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), arguments)
    start = time.process_time()
    jax.jit(function).lower(*arguments).compile()
    seconds = time.process_time() - start
    # Not getrusage: after a fork it still counts what the parent held.
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
    return seconds, peak / 1e9


@pytest.mark.parametrize(
    ("orthogonalize", "meta"),
    [
        pytest.param(False, False, id="base"),
        pytest.param(True, True, id="celo2 in meta-training", marks=pytest.mark.slow),
        pytest.param(True, False, id="celo2", marks=pytest.mark.slow),
        pytest.param(False, True, id="base in meta-training", marks=pytest.mark.slow),
    ],
)
def test_wide_rules_compile_as_quickly_as_narrow_ones(orthogonalize, meta):
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/jax']\n"
        "import jax; jax.config.update('jax_enable_compilation_cache', False)\n"
        "jax.config.update('jax_disable_most_optimizations', False)\n"
        "import test_update as t\n"
        f"t.compile_cost(2, {orthogonalize}, {meta})  # what only the first compilation does\n"
        f"print(*t.compile_cost(8, {orthogonalize}, {meta}))\n"
        f"print(*t.compile_cost(64, {orthogonalize}, {meta}))"
    )
    (narrow, _), (wide, peak) = (
        map(float, line.split()) for line in run_python(code, devices=1).splitlines()
    )
    assert wide < 4 * narrow
    assert peak < 2.0
