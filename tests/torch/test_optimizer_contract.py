"""The step as `torch.optim` promises it: closures, rates, schedulers, scaling, hooks, layouts."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from celo2.torch import Celo2, Celo2Base
from small import SMALL_BASE, make_rule
from torch_models import LR, RULE, assert_same, loss_of, make_model, parameter, rms, train


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
