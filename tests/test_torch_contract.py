"""The step as `torch.optim` promises it: closures, rates, schedulers, scaling, hooks, layouts."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

from celo2.torch import Celo2, Celo2Base
from small import SMALL_BASE, make_rule
from torch_models import LR, RULE, assert_same, loss_of, make_model, train


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Parameter:
    """With a gradient."""
    generator = torch.Generator().manual_seed(seed)
    param, grad = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    param = nn.Parameter(param)
    param.grad = grad
    return param


def rms(x: torch.Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()


@pytest.mark.parametrize("cls", [Celo2, Celo2Base])
def test_shipped_rule_trains(cls):
    model = make_model()
    optimizer = cls(model, lr=2e-3)
    losses = train(model, optimizer, 30)
    assert losses[-1] < 0.5 * losses[0]
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_closure_is_called_once_with_gradients_on_and_its_loss_returned():
    model, calls = make_model(), []
    optimizer = Celo2(model, LR, rule=RULE)

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    other = make_model()
    train(other, Celo2(other, LR, rule=RULE), 1)
    expected = loss_of(model).item()
    assert optimizer.step(closure).item() == expected and calls == [True]
    assert_same(model, other)
    assert optimizer.step() is None


def test_zero_grad_forgets_or_zeroes_the_gradients():
    model = make_model()
    optimizer = Celo2(model, LR, rule=RULE)
    loss_of(model).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_state_is_made_at_the_first_gradient_and_only_for_parameters_that_have_one():
    model = make_model()
    model[0].weight.requires_grad_(False)
    optimizer = Celo2(model, LR, rule=RULE)
    assert not optimizer.state
    optimizer.step()
    assert not optimizer.state
    before = copy.deepcopy(model)
    train(model, optimizer, 1)
    assert set(optimizer.state) == set(model.parameters()) - {model[0].weight}
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[2].weight, before[2].weight)


def test_parameters_without_gradient_for_a_step_do_not_move():
    model = make_model()
    optimizer = Celo2(model, LR, rule=RULE, weight_decay=0.1)
    train(model, optimizer, 2)
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer.step()
    assert_same(model, before)
    assert_same(optimizer.state_dict()["state"], state["state"])


def test_group_can_be_added_later():
    model = make_model()
    optimizer = Celo2(model, LR, rule=RULE)
    train(model, optimizer, 1)
    late = nn.Linear(4, 4)
    optimizer.add_param_group({"params": late, "lr": 1e-3, "updater": "rule"})
    assert len(optimizer.explain()) == 12
    before = copy.deepcopy(late)
    late(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    for old, new in zip(before.parameters(), late.parameters(), strict=True):
        assert rms(new - old) == pytest.approx(1e-3, rel=0.01)


def test_added_group_is_not_changed_for_the_caller():
    group = {"params": [("late", parameter(3, 3))]}
    Celo2(make_model(), rule=RULE).add_param_group(group)
    assert group.keys() == {"params"}


@pytest.mark.parametrize("cls", [Celo2, Celo2Base])
def test_maximize_is_descent_on_the_negative_loss(cls):
    rule = make_rule(SMALL_BASE) if cls is Celo2Base else RULE
    models = [make_model(), make_model()]
    for sign, model in zip((1, -1), models, strict=True):
        optimizer = cls(model, LR, rule=rule, weight_decay=0.1, maximize=sign > 0)
        for _ in range(3):
            optimizer.zero_grad()
            (sign * loss_of(model)).backward()
            optimizer.step()
    assert_same(*models)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensor_lr_equals_float_lr(shape, foreach):
    models = [make_model(), make_model()]
    for lr, model in zip((LR, torch.full(shape, LR)), models, strict=True):
        optimizer = Celo2(model, lr, rule=RULE, weight_decay=0.1, foreach=foreach)
        optimizer.add_param_group({"params": [("scalar", parameter())], "updater": "rule"})
        optimizer.step()  # of the scalar alone, which a tensor of more axes must not widen
        train(model, optimizer)
    assert_same(*models, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda opt: LambdaLR(opt, lambda step: 1 / (1 + step)),
        lambda opt: CosineAnnealingLR(opt, 5),
        lambda opt: OneCycleLR(opt, 0.1, 10, cycle_momentum=False),
    ],
    ids=["lambda", "cosine", "one cycle"],
)
@pytest.mark.parametrize("tensor", [False, True])
def test_schedulers_move_both_branches(make, tensor):
    weight, bias = parameter(5, 4), parameter(5)
    optimizer = Celo2(
        [("weight", weight), ("bias", bias)],
        torch.tensor(LR) if tensor else LR,
        rule=RULE,
        adam_multiplier=3,
        betas=(0.0, 0.0),  # each step of AdamW is then one rate long
    )
    scheduler = make(optimizer)
    for _ in range(4):
        lr = float(optimizer.param_groups[0]["lr"])
        before = weight.detach().clone(), bias.detach().clone()
        optimizer.step()
        scheduler.step()
        moved = [x - y for x, y in zip((weight, bias), before, strict=True)]
        assert rms(moved[0]) == pytest.approx(lr, rel=1e-3)
        assert rms(moved[1]) == pytest.approx(3 * lr, rel=1e-3)
    assert lr != LR


def test_grad_scaler_leaves_the_step_as_it_is_and_skips_infinite_ones():
    models = [make_model(), make_model()]
    train(models[0], Celo2(models[0], LR, rule=RULE), 2)
    optimizer = Celo2(models[1], LR, rule=RULE)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(loss_of(models[1]) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same(*models, rtol=1e-5, atol=1e-6)
    assert scaler.get_scale() == 512
    assert all(not state["skipped"] for state in optimizer.state.values() if "skipped" in state)


def test_step_inside_autocast_is_computed_in_full_precision():
    models = [make_model(), make_model()]
    optimizers = [Celo2(model, LR, rule=RULE) for model in models]
    for model, optimizer, inside in zip(models, optimizers, (False, True), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            optimizer.step()
    assert_same(*models)


def test_hooks_run_around_the_step():
    model, calls = make_model(), []
    optimizer = Celo2(model, LR, rule=RULE)
    before = optimizer.register_step_pre_hook(lambda opt, *_: calls.append(("pre", opt)))
    optimizer.register_step_post_hook(lambda opt, *_: calls.append(("post", opt)))
    train(model, optimizer, 1)
    before.remove()
    train(model, optimizer, 1)
    assert calls == [("pre", optimizer), ("post", optimizer), ("post", optimizer)]


def test_copy_goes_on_as_the_original_and_by_itself():
    model = make_model()
    optimizer = Celo2(model, LR, rule=RULE, overrides={"5": "rule"})
    train(model, optimizer)
    both = model, optimizer
    copied_model, copied = copy.deepcopy(both)
    assert train(copied_model, copied) == train(model, optimizer)
    assert_same(model, copied_model)
    assert copied.explain() == optimizer.explain()
    before = copy.deepcopy(model)
    train(copied_model, copied)
    assert_same(model, before)


def test_foreach_equals_one_by_one():
    models = [make_model(), make_model()]
    for foreach, model in zip((None, False), models, strict=True):
        train(model, Celo2(model, LR, rule=RULE, foreach=foreach, weight_decay=0.1), 5)
    assert_same(*models, rtol=1e-5, atol=1e-6)


def test_dtypes_and_shapes_can_be_mixed():
    kinds = torch.float32, torch.bfloat16, torch.float16, torch.float64
    shapes = (), (1,), (5,), (4, 6), (6, 4), (2, 3, 4), (0, 3), (4, 2, 3, 3)
    params = [parameter(*s, dtype=d) for d in kinds for s in shapes]
    before = [param.detach().clone() for param in params]
    optimizer = Celo2(params, LR, rule=make_rule(SMALL_BASE))
    alone = [parameter(*s, dtype=d) for d in kinds for s in shapes]
    for param in alone:
        Celo2([param], LR, rule=make_rule(SMALL_BASE), foreach=False).step()
    optimizer.step()
    for param, old, other in zip(params, before, alone, strict=True):
        assert param.dtype == old.dtype
        assert_same(param, other, rtol=1e-6, atol=1e-6)
        if param.numel() > 1:
            rel = 0.2 if param.dtype.itemsize == 2 else 1e-3
            assert rms(param - old) == pytest.approx(LR, rel=rel)


@pytest.mark.parametrize("shape", [(), (0, 3), (0,), (3, 0)])
@pytest.mark.parametrize("updater", [None, "rule", "adam"])
def test_scalars_and_empty_tensors_are_no_trouble(shape, updater):
    param = parameter(*shape)
    before = param.detach().clone()
    optimizer = Celo2([{"params": [("x", param)], "updater": updater}], LR, rule=RULE)
    for _ in range(2):
        optimizer.step()
    assert param.isfinite().all() and (param.numel() == 0 or (param != before).all())
    assert all(x.isfinite().all() for state in optimizer.state.values() for x in state.values())


@pytest.mark.parametrize("foreach", [None, False])
def test_memory_layout_does_not_matter(foreach):
    layouts = [
        lambda x: x,
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0),
        lambda x: torch.stack([x, x], -1)[..., 0],
    ]
    results = []
    for layout in layouts:
        torch.manual_seed(0)
        start, grads = torch.randn(4, 3, 2, 2), torch.randn(3, 4, 3, 2, 2)
        params = [nn.Parameter(layout(start.clone())) for _ in range(2)]
        strides = params[0].stride()
        optimizer = Celo2(list(zip("ab", params, strict=True)), LR, rule=RULE, foreach=foreach)
        for grad in grads:
            for param in params:
                param.grad = layout(grad.clone())
            optimizer.step()
        assert params[0].stride() == strides
        results.append([params, [optimizer.state[param] for param in params]])
    for params, states in results[1:]:
        for ours, expected in zip((params, states), results[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, check_stride=False)


def test_parameters_of_several_devices_go_together():
    here, elsewhere = parameter(4, 6), nn.Parameter(torch.zeros(4, 6, device="meta"))
    vector = nn.Parameter(torch.zeros(3, device="meta"))
    elsewhere.grad, vector.grad = (torch.empty_like(p) for p in (elsewhere, vector))
    alone = copy.deepcopy(here)
    alone.grad = here.grad
    Celo2([("a", alone)], LR, rule=RULE).step()
    optimizer = Celo2([("a", here), ("b", elsewhere), ("c", vector)], LR, rule=RULE)
    optimizer.step()
    assert_same(here, alone)
    assert all(x.is_meta for x in optimizer.state[elsewhere].values())


class NoSync(TorchDispatchMode):
    """Refuses what makes the host wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("tensor", [False, True])
def test_capturable_step_never_waits_for_the_device(monkeypatch, foreach, tensor):
    # Torch's AdamW takes this path on accelerators only; `torch.optim` hides the module.
    adam = sys.modules["torch.optim.adam"]
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    models, lr = [make_model(), make_model()], torch.tensor(LR) if tensor else LR
    optimizers = [
        Celo2(model, lr, rule=RULE, weight_decay=0.1, foreach=foreach, capturable=capturable)
        for capturable, model in zip((False, True), models, strict=True)
    ]
    for _ in range(2):
        for model in models:
            model.zero_grad()
            loss_of(model).backward()
        with NoSync():
            optimizers[1].step()
        optimizers[0].step()
    assert_same(*models, rtol=1e-5, atol=1e-6)
    with NoSync(), pytest.raises(AssertionError, match="_local_scalar_dense waits"):
        optimizers[0].step()  # what the mode is for
