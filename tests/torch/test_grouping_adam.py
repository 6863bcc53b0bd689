"""AdamW beside the rule is optax's, also where gradients are not finite or weights are halves."""

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn

import celo2.jax
from celo2.rule import ADAM_MULTIPLIER
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
    first = Celo2([("bias", bias)], RATE, adam_nesterov=False)
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
    expected = before.numpy() - ADAM_MULTIPLIER * RATE * ahead / (np.sqrt(v) + 1e-8)
    np.testing.assert_allclose(bias.detach().numpy(), expected, rtol=0, atol=2e-6)


def steps_of(optimizer: Celo2, param: nn.Parameter, grads: list[torch.Tensor]) -> torch.Tensor:
    for grad in grads:
        param.grad = grad
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("lr", [RATE, torch.tensor(RATE)], ids=["float", "tensor"])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_nonfinite_elements_of_a_gradient_count_as_zeros(nesterov, foreach, lr, compile):
    start, grads = vectors()
    bad, zero = torch.from_numpy(grads.copy()), torch.from_numpy(grads.copy())
    for step, (i, value) in enumerate(((0, np.nan), (2, np.inf), (2, -np.inf))):
        bad[step, i], zero[step, i] = value, 0
    kept, found = bad.clone(), []
    for some in (bad, zero):
        bias = nn.Parameter(torch.from_numpy(start.copy()))
        options = {"adam_nesterov": nesterov, "foreach": foreach, "compile": compile}
        optimizer = Celo2([("bias", bias)], lr, weight_decay=0.1, **options)
        found.append(steps_of(optimizer, bias, list(some)))
    assert torch.equal(*found) and found[0].isfinite().all()
    torch.testing.assert_close(bad, kept, rtol=0, atol=0, equal_nan=True)  # it is the user's


@pytest.mark.parametrize("policy", [{"skip_nonfinite": False}, {"published": True}])
def test_nonfinite_gradient_goes_in_where_the_policy_is_off(policy):
    bias = nn.Parameter(torch.ones(3))
    optimizer = Celo2([("bias", bias)], **policy)
    assert steps_of(optimizer, bias, [torch.tensor([1, np.nan, 1])]).isnan().tolist()[1]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
def test_tensors_are_cut_into_pieces_with_the_same_result(foreach, nesterov):
    start, grads = torch.randn(5, 4), [torch.randn(5, 4) for _ in range(3)]
    found, options = [], {"foreach": foreach, "adam_nesterov": nesterov, "weight_decay": 0.1}
    for workspace in (None, 100):
        params = [nn.Parameter(x.clone()) for x in (start, start[0], start[:, 0])]
        optimizer = Celo2([{"params": params, "updater": "adam"}], workspace=workspace, **options)
        for grad in grads:
            for param, own in zip(params, (grad, grad[0], grad[:, 0]), strict=True):
                param.grad = own.clone()
            optimizer.step()
        found.append((params, [optimizer.state[param] for param in params]))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("foreach", [True, False])
def test_weight_decay_reaches_weights_in_half_precision(foreach):
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        bias = nn.Parameter(torch.linspace(1, 2, 4096).bfloat16().to(dtype))
        grads = [torch.randn(4096).bfloat16().to(dtype) for _ in range(20)]
        options = {"weight_decay": 0.1, "adam_multiplier": 8, "foreach": foreach}
        optimizer = Celo2([("bias", bias)], RATE, **options)
        found[dtype] = steps_of(optimizer, bias, grads).float().mean().item()
    # Without it the mean stays at 1.5; with it, it falls by 20 · 8 · RATE · 0.1 of that.
    assert found[torch.bfloat16] == pytest.approx(found[torch.float32], abs=5e-3)
    assert found[torch.bfloat16] < 1.485


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 1e19),
        (torch.float32, 3e38),
        (torch.bfloat16, 1e38),
        (torch.float16, 6e4),
        (torch.float16, 6e-8),
        (torch.float64, 1e200),
    ],
)
def test_no_finite_gradient_makes_anything_infinite(dtype, size, nesterov):
    bias = nn.Parameter(torch.linspace(-1, 1, 5).to(dtype))
    start = bias.detach().clone()
    optimizer = Celo2([("bias", bias)], RATE, adam_nesterov=nesterov)
    moved = steps_of(optimizer, bias, [torch.full((5,), size, dtype=dtype)] * 5)
    state = optimizer.state[bias]
    assert moved.isfinite().all() and (moved < start).all()
    assert all(x.isfinite().all() for x in state.values())
    kept = torch.promote_types(dtype, torch.float32)
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == kept
    assert optimizer.skipped() == (0, 0)


def test_nonfinite_gradients_of_both_branches_are_counted_and_shown():
    params = {"kernel": nn.Parameter(torch.ones(3, 4)), "bias": nn.Parameter(torch.ones(4))}
    optimizer = Celo2(list(params.items()), RATE)
    for bad in (("kernel",), ("bias",), ("kernel", "bias"), ("bias",), ()):
        for name, param in params.items():
            param.grad = torch.full_like(param, torch.inf if name in bad else 1.0)
        optimizer.step()
    assert optimizer.skipped() == (2, 3)
    assert optimizer.skipped().rule == 2 and optimizer.skipped().adam == 3
    other = Celo2(list(params.items()), RATE)
    other.load_state_dict(optimizer.state_dict())
    assert other.skipped() == (2, 3)


def test_state_of_an_older_version_is_taken_up():
    bias = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Celo2([("bias", bias)], RATE)
    steps_of(optimizer, bias, [torch.ones(4, dtype=torch.bfloat16)])
    saved = optimizer.state_dict()
    del saved["state"][0]["skipped"]
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].bfloat16()
    optimizer.load_state_dict(saved)
    state = optimizer.state[bias]
    assert state["skipped"] == 0 and state["exp_avg"].dtype == torch.float32
    steps_of(optimizer, bias, [torch.ones(4, dtype=torch.bfloat16)])
    assert state["step"] == 2


def test_parameter_given_twice_is_warned_of_and_moved_once():
    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))]
    twice, once = ([(f"{i}", p) for i, p in enumerate(some)] for some in (params * 2, params))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        first = Celo2(twice, RATE)
    found = []
    for optimizer in (first, Celo2(once, RATE)):
        for param in params:
            param.data.fill_(1.0)
            param.grad = torch.linspace(1, 2, param.numel()).view(param.shape)
        optimizer.step()
        found.append([param.detach().clone() for param in params])
    torch.testing.assert_close(*found, rtol=0, atol=0)
