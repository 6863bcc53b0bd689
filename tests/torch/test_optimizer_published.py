"""`published=True` follows the authors' code, whose arrays are of JAX's order of axes."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import celo2.jax
from celo2.routing import MatrixView
from celo2.torch import Celo2
from rules import jit
from small import SMALL, SMALL_BASE, make_rule

STEPS = 3
# A layer, and the order in which JAX would store the axes of its weight.
LAYERS = {
    "square": (nn.Linear(6, 6, bias=False), (1, 0)),
    "wide": (nn.Linear(4, 6, bias=False), (1, 0)),
    "conv": (nn.Conv2d(4, 6, (2, 3), bias=False), (2, 3, 1, 0)),
    "cube": (nn.Conv1d(3, 3, 3, bias=False), (2, 1, 0)),
    "up": (nn.ConvTranspose2d(4, 6, 2, bias=False), (2, 3, 0, 1)),
    "table": (nn.Embedding(5, 5), (0, 1)),
}


@pytest.mark.parametrize("config", [SMALL, SMALL_BASE], ids=["celo2", "celo2-base"])
def test_published_updates_of_both_frameworks_agree(config):
    rule = make_rule(config)
    model = nn.ModuleDict({name: layer for name, (layer, _) in LAYERS.items()})
    overrides = {"": "rule"}
    optimizer = Celo2(model, 1.0, rule=rule, published=True, overrides=overrides)
    tx = celo2.jax.celo2(1.0, rule=rule, published=True, overrides=overrides)
    update = jit(tx.update)
    state, rng = None, np.random.default_rng(0)
    for _ in range(STEPS):
        params, grads, weights = {}, {}, {}
        for name, (layer, order) in LAYERS.items():
            weight = weights[name] = layer.weight
            start, grad = rng.normal(size=(2, *weight.shape)).astype("f4")
            weight.data, weight.grad = torch.from_numpy(start.copy()), torch.from_numpy(grad)
            params[name], grads[name] = (jnp.asarray(x.transpose(order)) for x in (start, grad))
        optimizer.step()
        state = tx.init(params) if state is None else state
        updates, state = update(grads, state, params)
        for name, (_, order) in LAYERS.items():
            ours = weights[name].detach().numpy().transpose(order) - np.asarray(params[name])
            np.testing.assert_allclose(ours, updates[name], rtol=0, atol=2e-4, err_msg=name)


def test_published_layout_is_the_last_two_axes_of_jax_s_order():
    model = nn.ModuleDict({name: layer for name, (layer, _) in LAYERS.items()})
    table = Celo2(model, rule=make_rule(), published=True).explain()
    for line, (_, order) in zip(table, LAYERS.values(), strict=True):
        assert line.view == MatrixView(order[:-2], order[-2:-1], order[-1:], True), line.path
