"""AdamW beside the rule is optax's, with and without Nesterov's momentum."""

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn

import celo2.jax
from celo2.torch import Celo2

RATE, STEPS = 1e-3, 12


def vectors() -> tuple[np.ndarray, np.ndarray]:
    """The first parameters, and a gradient for each step."""
    rng = np.random.default_rng(0)
    return rng.normal(size=7).astype("f4"), rng.normal(size=(STEPS, 7)).astype("f4")


def in_jax(nesterov: bool) -> np.ndarray:
    start, grads = vectors()
    tx = celo2.jax.celo2(RATE, weight_decay=0.1, adam_nesterov=nesterov)
    params = {"bias": jax.numpy.asarray(start)}
    state = tx.init(params)
    for grad in grads:
        updates, state = tx.update({"bias": grad}, state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params["bias"])


@pytest.mark.parametrize("lr", [RATE, torch.tensor(RATE)], ids=["float", "tensor"])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_adam_equals_optax_s(nesterov, foreach, lr):
    start, grads = vectors()
    bias = nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = Celo2(
        [("bias", bias)], lr, weight_decay=0.1, adam_nesterov=nesterov, foreach=foreach
    )
    for grad in grads:
        bias.grad = torch.from_numpy(grad)
        optimizer.step()
    np.testing.assert_allclose(bias.detach().numpy(), in_jax(nesterov), rtol=0, atol=2e-6)


def test_nesterov_s_momentum_makes_a_difference():
    assert np.abs(in_jax(True) - in_jax(False)).max() > RATE


def test_nesterov_s_momentum_can_be_switched_on_for_a_saved_state():
    def step(optimizer, grad):
        bias.grad = torch.from_numpy(grad)
        optimizer.step()

    start, grads = vectors()
    bias = nn.Parameter(torch.from_numpy(start.copy()))
    first = Celo2([("bias", bias)], RATE)
    step(first, grads[0])
    second = Celo2([("bias", bias)], RATE, adam_nesterov=True)
    saved = first.state_dict()
    for group in saved["param_groups"]:
        del group["adam_nesterov"]  # as an older version saved it
    second.load_state_dict(saved)
    before = bias.detach().clone()
    step(second, grads[1])
    m, corrections = 0.9 * 0.1 * grads[0] + 0.1 * grads[1], (1 - 0.9**2, 1 - 0.9**3)
    v = (0.95 * 0.05 * grads[0] ** 2 + 0.05 * grads[1] ** 2) / (1 - 0.95**2)
    ahead = 0.1 * grads[1] / corrections[0] + 0.9 * m / corrections[1]
    expected = before.numpy() - 8 * RATE * ahead / (np.sqrt(v) + 1e-8)
    np.testing.assert_allclose(bias.detach().numpy(), expected, rtol=0, atol=2e-6)
