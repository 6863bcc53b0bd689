"""The JAX room against the authors' vectors and against the float64 reference."""

import dataclasses
import functools
import json
from typing import NamedTuple, get_args

import numpy as np
import optax
import pytest

import reference
import reference_parts
from celo2.jax import scale_by_celo2
from celo2.routing import MatrixView, default_view
from celo2.rule import CELO2, Form, Norm, Rule, RuleConfig
from conftest import golden_folder
from rules import SMALL, jit, make_rule
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
    folder = golden_folder()
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
