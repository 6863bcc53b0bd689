"""The Torch update against the authors' vectors, the float64 reference and the JAX update."""

import dataclasses
import json
from typing import NamedTuple, get_args

import numpy as np
import pytest
import torch
from torch import nn

import reference
import reference_parts
from celo2.routing import MatrixView, default_view, published_view
from celo2.rule import CELO2, CELO2_BASE, REFERENCE_WIDTH, Form, Norm, Rule, RuleConfig
from celo2.torch import Celo2
from conftest import golden_folder
from small import GATED, SMALL, make_rule
from test_reference import GOLDEN, golden_config, golden_weights

STEPS = 4
LR = 1e-2


class Holder(nn.Module):
    """A module with one bare parameter."""

    def __init__(self, *shape: int):
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(shape))


class Leaf(NamedTuple):
    """A module whose first parameter is looked at, and the view that it should have."""

    module: nn.Module
    view: MatrixView


LEAVES = {
    "scalar": Leaf(Holder(), default_view(0)),
    "vector": Leaf(nn.LayerNorm(7), default_view(1)),
    "linear": Leaf(nn.Linear(12, 4), MatrixView((), (1,), (0,))),
    "square": Leaf(nn.Linear(5, 5), MatrixView((), (1,), (0,))),
    "one_row": Leaf(nn.Linear(9, 1), MatrixView((), (1,), (0,))),
    "one_column": Leaf(nn.Linear(1, 9), MatrixView((), (1,), (0,))),
    "table": Leaf(nn.Embedding(9, 4), MatrixView((), (0,), (1,))),
    "conv_1d": Leaf(nn.Conv1d(2, 12, 2), MatrixView((), (1, 2), (0,))),
    "conv_2d": Leaf(nn.Conv2d(2, 3, (2, 3)), MatrixView((), (1, 2, 3), (0,))),
    "conv_3d": Leaf(nn.Conv3d(2, 4, 2), MatrixView((), (1, 2, 3, 4), (0,))),
    "grouped": Leaf(nn.Conv2d(4, 6, 2, groups=2), MatrixView((), (1, 2, 3), (0,))),
    "depthwise": Leaf(nn.Conv2d(4, 4, 3, groups=4), MatrixView((), (1, 2, 3), (0,))),
    "transposed": Leaf(nn.ConvTranspose2d(3, 5, 2), MatrixView((), (0, 2, 3), (1,))),
    "experts": Leaf(Holder(2, 6, 4), MatrixView((0,), (2,), (1,))),
    "bilinear": Leaf(nn.Bilinear(2, 3, 4), MatrixView((), (1, 2), (0,))),
}
BAD_ENTRIES = {"experts": (0, 1, 2), "conv_2d": (1, 0, 1, 2), "linear": (0, 0)}


def draw(shapes: dict, seed: int = 0) -> tuple[list, list]:
    """Parameters and gradients of a few steps, with gradients that are late, bad, small, large."""
    rng = np.random.default_rng(seed)

    def tree(scale):
        return {k: np.asarray(scale * rng.normal(size=s), np.float32) for k, s in shapes.items()}

    params = [tree(0.3) for _ in range(STEPS)]
    grads = [tree(scale) for scale in (1.0, 1e-3, 30.0, 0.1)]
    for name in ("square", "vector"):
        grads[0][name][...] = 0  # starts a step late
    grads[0]["experts"][1] = 0  # one slice does
    for name, entry in BAD_ENTRIES.items():
        grads[2][name][entry] = -np.inf  # loses a step
    return params, grads


def torch_updates(optimizer: Celo2, tensors: dict, params: list, grads: list) -> list[dict]:
    """What each step subtracts, over the learning rate."""
    updates = []
    for param, grad in zip(params, grads, strict=True):
        for name, tensor in tensors.items():
            tensor.data.copy_(torch.from_numpy(param[name]))
            tensor.grad = torch.from_numpy(grad[name])
        optimizer.step()
        updates.append(
            {name: (param[name] - t.detach().numpy()) / LR for name, t in tensors.items()}
        )
    return updates


def reference_updates(config, weights, view, params, grads, **policies):
    views = [[reference_parts.view(x, view) for x in xs] for xs in (params, grads)]
    moments = reference.init(config, views[1][0].shape)
    updates = []
    for param, grad in zip(*views, strict=True):
        update, moments = reference.step(config, weights, param, grad, moments, **policies)
        updates.append(reference_parts.unview(update, view, params[0].shape))
    return updates, moments


def check_parity(config: RuleConfig, atol: float, **options):
    rule = make_rule(config)
    model = nn.ModuleDict({name: leaf.module for name, leaf in LEAVES.items()})
    optimizer = Celo2(model, LR, rule=rule, overrides={"": "rule"}, **options)
    tensors = {name: next(leaf.module.parameters()) for name, leaf in LEAVES.items()}
    for parameter in model.parameters():
        parameter.grad = None
    params, grads = draw({name: tuple(t.shape) for name, t in tensors.items()})
    updates = torch_updates(optimizer, tensors, params, grads)
    hold, skip = options.get("hold_unused", True), options.get("skip_nonfinite", True)
    lines = {line.path: line for line in optimizer.explain()}
    for name, leaf in LEAVES.items():
        path = name + "." + next(n for n, _ in leaf.module.named_parameters())
        assert lines[path].view == leaf.view, name
        expected, moments = reference_updates(
            config,
            rule.weights,
            leaf.view,
            [tree[name] for tree in params],
            [tree[name] for tree in grads],
            hold=hold,
            skip_nonfinite=skip,
        )
        ours = np.stack([tree[name] for tree in updates])
        if options.get("scale") == "spectral" and leaf.view.rows:
            inputs, outputs = leaf.view.shape(tuple(tensors[name].shape))[-2:]
            values = np.sqrt(REFERENCE_WIDTH * max(1, outputs / inputs))  # singular ones
            ours /= values / np.sqrt(max(inputs, outputs))
        np.testing.assert_allclose(ours, expected, rtol=atol, atol=atol, err_msg=name)
        state = optimizer.state[tensors[name]]
        np.testing.assert_array_equal(state["moves"].ravel(), moments.moved.ravel(), err_msg=name)
        if config.norm.startswith("rolling"):
            np.testing.assert_allclose(
                state["running_rms"].ravel(), moments.running_rms.ravel(), rtol=1e-4, err_msg=name
            )


@pytest.mark.parametrize("norm", get_args(Norm))
@pytest.mark.parametrize("form", get_args(Form))
def test_every_form_and_norm_equals_the_reference(form, norm):
    # Updates are read from the parameters' float32 differences: 1e-7 of a parameter over LR.
    check_parity(dataclasses.replace(SMALL, form=form, norm=norm), atol=5e-4)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("config", [CELO2, CELO2_BASE], ids=["celo2", "celo2-base"])
def test_the_shipped_kinds_of_rule_equal_the_reference(config, foreach):
    check_parity(config, atol=5e-4, foreach=foreach)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("orthogonalize", [True, False])
def test_gated_rule_equals_the_reference(orthogonalize, foreach):
    config = dataclasses.replace(GATED, orthogonalize=orthogonalize)
    check_parity(config, atol=5e-4, foreach=foreach)


@pytest.mark.parametrize("foreach", [None, False])
def test_spectral_scale_equals_the_reference(foreach):
    check_parity(SMALL, atol=5e-4, scale="spectral", foreach=foreach)


def test_equal_shapes_with_other_inputs_have_scales_of_their_own():
    params = {name: nn.Parameter(torch.zeros(4, 12)) for name in ("linear", "transposed")}
    for param in params.values():
        param.grad = torch.linspace(-1, 1, 48).sin().view(4, 12)
    optimizer = Celo2(
        list(params.items()),
        LR,
        rule=make_rule(),
        scale="spectral",
        overrides={"transposed": MatrixView((), (0,), (1,))},
    )
    optimizer.step()
    linear, transposed = (param.detach().square().mean().sqrt() for param in params.values())
    assert linear == pytest.approx(LR * np.sqrt(REFERENCE_WIDTH / 12), rel=1e-4)
    assert transposed == pytest.approx(LR * np.sqrt(REFERENCE_WIDTH / 4), rel=1e-4)


@pytest.mark.parametrize("foreach", [None, False])
def test_spectral_scale_divides_the_updates_of_heads_by_their_inputs(foreach):
    moved = {}
    for scale in ("rms", "spectral"):
        torch.manual_seed(0)
        # The middle one has the head's shape.
        model = nn.Sequential(nn.Embedding(5, 32), nn.Linear(32, 5), nn.Linear(5, 32))
        model.append(nn.Linear(32, 5))
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        optimizer = Celo2(
            model, LR, rule=make_rule(), scale=scale, overrides={"^1": "adam"}, foreach=foreach
        )
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
        moved[scale] = {n: param.detach() - before[n] for n, param in model.named_parameters()}
    reasons = {line.path: line.reason for line in optimizer.explain()}
    assert reasons["3.weight"] == "output head"
    factors = {"3.weight": REFERENCE_WIDTH / 32, "2.weight": np.sqrt(REFERENCE_WIDTH / 5)}
    for name, update in moved["rms"].items():
        wanted = factors.get(name, 1.0) * update
        torch.testing.assert_close(moved["spectral"][name], wanted, rtol=1e-4, atol=1e-7)


def test_policies_can_be_switched_off():
    check_parity(SMALL, atol=5e-4, skip_nonfinite=False, hold_unused=False)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("workspace", [1, 2000])
def test_workspace_does_not_change_the_result(workspace, foreach):
    config = dataclasses.replace(SMALL, norm="rolling_norm")
    check_parity(config, atol=5e-4, foreach=foreach, workspace=workspace)


@pytest.mark.parametrize("name", GOLDEN)
def test_update_equals_the_published_implementation(name):
    folder = golden_folder(name)
    golden = json.loads((folder / "golden.json").read_text())["configs"][name]
    config = golden_config(golden["settings"])
    with np.load(folder / golden["file"]) as arrays:
        rule = Rule(config, golden_weights(arrays))
        leaves = golden["leaves"]
        params, grads, expected = (
            {leaf: arrays[f"{kind}/{leaf}"] for leaf in leaves}
            for kind in ("params", "grads", "updates_f64")
        )
        tensors = {leaf: nn.Parameter(torch.tensor(params[leaf][0])) for leaf in leaves}
        # They are stored as in JAX: not how names would have it in Torch.
        views = {f"^{leaf}$": published_view(params[leaf][0].ndim) for leaf in leaves}
        optimizer = Celo2(list(tensors.items()), 1.0, rule=rule, published=True, overrides=views)
        for t in range(len(next(iter(grads.values())))):
            for leaf, tensor in tensors.items():
                # From zero, so that the parameter's rounding does not blur the update.
                tensor.data.copy_(torch.tensor(params[leaf][t]))
                tensor.grad = torch.tensor(grads[leaf][t])
            before = {leaf: t.detach().double().numpy() for leaf, t in tensors.items()}
            optimizer.step()
            for leaf, tensor in tensors.items():
                scale = golden["settings"]["rmsmult"]
                np.testing.assert_allclose(
                    scale * (before[leaf] - tensor.detach().numpy()),
                    expected[leaf][t],
                    rtol=0,
                    atol=1e-4 if config.orthogonalize else 1e-5,
                    err_msg=f"{leaf}, step {t}",
                )
        for leaf, tensor in tensors.items():
            check_golden_state(optimizer.state[tensor], arrays, leaf)


def check_golden_state(state: dict, arrays, leaf: str):
    """The published arrays have the decays last and lack the reduced axes."""
    vector = state["rms"].ndim < 2
    ours = {
        "m": [state[f"momentum_{i}"] for i in range(3)],
        "rms": [state["rms"]],
        "v_diag" if vector else "v_row": list(state["rows"]),
    }
    for name, planes in (ours if vector else ours | {"v_col": list(state["cols"])}).items():
        stored = arrays[f"state/{name}/{leaf}"]
        np.testing.assert_allclose(
            np.stack([plane.numpy().reshape(stored.shape[:-1]) for plane in planes], axis=-1),
            stored,
            rtol=1e-6,
            atol=1e-6 * np.abs(stored).max(),
            err_msg=f"{leaf} {name}",
        )
