"""The JAX room against the authors' vectors and against the float64 reference."""

import dataclasses
import json
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import reference
from celo2.jax import scale_by_celo2
from celo2.layout import MatrixView, default_view
from celo2.rule import CELO2, CELO2_BASE, Form, Norm, Rule, RuleConfig
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
    "wide_too": Leaf((4, 12), default_view(2)),
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
        grads[2]["experts"][0, 1, 2] = np.inf  # and the other loses a step
        grads[1]["wide_too"][:] = np.inf
        grads[2]["muon"][0, 0] = -np.inf
        grads[2]["layers/bias"][2, 1] = np.inf
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
    views = [[reference.view(x, leaf.view) for x in xs] for xs in (params, grads)]
    moments = reference.init(config, views[1][0].shape)
    updates = []
    for param, grad in zip(*views, strict=True):
        update, moments = reference.step(config, weights, param, grad, moments, **policies)
        updates.append(reference.unview(update, leaf.view, params[0].shape))
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
            check_state(state, moments, name, leaf)


def check_state(state, moments, name: str, leaf: Leaf):
    """The state's arrays keep reduced axes; otherwise they are the reference's moments."""
    stored = {
        "momentum": [reference.view(np.asarray(m[name]), leaf.view) for m in state.momentum],
        "rms": [reference.view(np.asarray(state.rms[name]), leaf.view)],
        "rows": [row[name] for row in state.rows],
        "running_rms": [state.running_rms[name]],
        "moved": [state.moves[name]],
    }
    if not leaf.view.is_vector:
        stored["cols"] = [col[name] for col in state.cols]
    for field, ours in stored.items():
        theirs = getattr(moments, field)
        if field == "running_rms" and not theirs.any():
            continue
        for x, y in zip(ours, theirs if isinstance(theirs, list) else [theirs], strict=True):
            if field == "running_rms" and not np.any(x):
                continue  # only the rolling norms keep it
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
    check_parity(dataclasses.replace(SMALL, form=form, norm=norm), LEAVES, atol=2e-4)
