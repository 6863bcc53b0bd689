"""Saving and loading the optimizer's state."""

import copy
import dataclasses
import io

import pytest
import torch
from torch import nn

from celo2.routing import MatrixView
from celo2.torch import Celo2
from small import SMALL, make_rule
from torch_models import LR, RULE, assert_same, make_model, train


def trained(dtype: torch.dtype = torch.float32, **options) -> tuple[nn.Module, Celo2]:
    model = make_model(dtype)
    optimizer = Celo2(model, LR, rule=RULE, **options)
    train(model, optimizer)
    return model, optimizer


def saved_and_loaded(content):
    """As a checkpoint of somebody one does not know would be read."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("momentum_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fresh_optimizer_goes_on_to_the_bit(dtype, momentum_dtype):
    options = {"momentum_dtype": momentum_dtype, "weight_decay": 0.1}
    model, optimizer = trained(dtype, **options)
    content = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = make_model(dtype, seed=1)
    other.load_state_dict(content["model"])
    fresh = Celo2(other, LR, rule=RULE, **options)
    fresh.load_state_dict(content["optimizer"])
    assert train(other, fresh) == train(model, optimizer)
    assert_same(other, model)
    assert_same(fresh.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("momentum_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_keep_their_dtype(dtype, momentum_dtype):
    model, optimizer = trained(dtype, momentum_dtype=momentum_dtype)
    optimizer.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    train(model, optimizer, 1)
    assert {k: v.dtype for k, v in optimizer.state[model[0].weight].items()} == {
        "momentum_0": momentum_dtype or torch.float32,
        "rms": torch.float32,
        "rows": torch.float32,
        "cols": torch.float32,
        "running_rms": torch.float32,
        "moves": torch.int32,
        "skipped": torch.int32,
    }


def test_state_dict_is_read_back_as_it_was():
    content = trained()[1].state_dict()
    back = saved_and_loaded(content)
    assert back["param_groups"] == content["param_groups"]
    assert_same(back["state"], content["state"])


def test_settings_are_loaded_and_rule_and_routes_are_kept():
    _, optimizer = trained(weight_decay=0.1, rms_scale=0.2)
    optimizer.param_groups[0]["lr"] = 3e-4
    content = saved_and_loaded(optimizer.state_dict())
    fresh = Celo2(make_model(), 1.0, rule=RULE)
    content["param_groups"][0]["routes"] = content["param_groups"][0]["rule"] = None
    fresh.load_state_dict(content)
    group = fresh.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["rms_scale"]) == (3e-4, 0.1, 0.2)
    assert fresh.explain() == optimizer.explain()
    train(make_model(), fresh)


def test_setting_that_a_saved_state_lacks_is_the_default():
    _, optimizer = trained()
    content = saved_and_loaded(optimizer.state_dict())
    for name in ("maximize", "foreach", "capturable", "hold_unused", "newton_schulz_dtype"):
        del content["param_groups"][0][name]
    model = make_model()
    fresh = Celo2(model, LR, rule=RULE)
    fresh.load_state_dict(content)
    assert fresh.param_groups[0]["hold_unused"] is True
    train(model, fresh)


def test_loading_does_not_change_what_is_loaded():
    _, optimizer = trained()
    content = saved_and_loaded(optimizer.state_dict())
    before = copy.deepcopy(content)
    Celo2(make_model(), 1.0, rule=RULE).load_state_dict(content)
    assert content["param_groups"] == before["param_groups"]
    assert_same(content["state"], before["state"])


def test_state_of_parameters_without_gradients_is_not_needed():
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = Celo2(model, LR, rule=RULE)
    train(model, optimizer)
    other = make_model()
    fresh = Celo2(other, LR, rule=RULE)
    fresh.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert other[0].weight not in fresh.state
    train(other, fresh)
    assert fresh.state[other[0].weight]["moves"] == 3
    assert fresh.state[other[2].weight]["moves"] == 6


def refused(message: str, content, fresh: Celo2) -> None:
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(ValueError, match=message):
        fresh.load_state_dict(content)
    assert fresh.state_dict()["param_groups"] == before["param_groups"]
    assert_same(fresh.state_dict()["state"], before["state"])


@pytest.mark.filterwarnings("ignore:The state was saved with another rule")
def test_state_of_a_rule_with_other_decays_is_refused():
    config = dataclasses.replace(SMALL, momentum_decays=(0.9, 0.99), factored_decays=(0.9, 0.99))
    model = make_model()
    fresh = Celo2(model, LR, rule=make_rule(config))
    train(model, fresh)
    refused("0.weight has 1 momenta and the rule 2", trained()[1].state_dict(), fresh)
    other = Celo2(make_model(), LR, rule=RULE)
    refused("0.weight has 2 momenta and the rule 1", fresh.state_dict(), other)


def test_state_of_other_views_is_refused():
    content = trained()[1].state_dict()
    message = r"2.weight has rows of shape \(1, 6, 1\) where .* is needed: .* other views"
    overrides = {"2.weight": MatrixView((), (0,), (1,))}  # square: its orientation matters
    refused(message.replace("6, 1", "1, 6"), content, with_options(overrides=overrides))
    model = nn.ModuleDict({"conv": nn.Conv2d(4, 4, 2)})
    first, second = (Celo2(model, LR, rule=RULE, published=p) for p in (True, False))
    model["conv"](torch.ones(1, 4, 2, 2)).sum().backward()
    first.step()
    refused(
        "conv.weight has rows of shape .* was made with other views", first.state_dict(), second
    )


def with_options(**options) -> Celo2:
    return Celo2(make_model(), LR, rule=RULE, **options)


def test_state_of_another_routing_is_refused():
    content = trained()[1].state_dict()
    refused("0.weight is the rule's, but AdamW", content, with_options(overrides={"0.w": "adam"}))
    refused("5.weight has 0 momenta", content, with_options(overrides={"5.w": "rule"}))


def test_state_of_another_model_is_refused():
    content = trained()[1].state_dict()
    refused("parameter group", content, Celo2(nn.Linear(4, 4), rule=RULE))
    fresh = with_options()
    fresh.add_param_group({"params": nn.Linear(2, 2)})
    refused("number of parameter groups", content, fresh)


def test_another_rule_goes_on_with_a_warning():
    model, optimizer = trained()
    fresh = Celo2(model, LR, rule=make_rule(seed=5))
    own = fresh.param_groups[0]["rule"]
    with pytest.warns(UserWarning, match=f"saved with another rule than {own}") as caught:
        fresh.load_state_dict(optimizer.state_dict())
    assert len(caught) == 1 and caught[0].filename == __file__
    assert fresh.param_groups[0]["rule"] == own
    train(model, fresh)


def test_hooks_see_and_change_the_content():
    _, optimizer = trained()
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("before"))

    def label(opt, content):
        return content | {"label": "mine"}

    optimizer.register_state_dict_post_hook(label)
    content = optimizer.state_dict()
    assert calls == ["before"] and content["label"] == "mine"

    def halve(opt, content):
        content = copy.deepcopy(content)
        for state in content["state"].values():
            if "rms" in state:
                state["rms"] /= 2
        return content

    model = make_model()
    fresh = Celo2(model, LR, rule=RULE)
    fresh.register_load_state_dict_pre_hook(halve)
    fresh.register_load_state_dict_post_hook(lambda opt: calls.append("after"))
    fresh.load_state_dict(content)
    assert calls == ["before", "after"]
    assert_same(fresh.state[model[0].weight]["rms"], content["state"][0]["rms"] / 2)
    assert len(fresh._optimizer_load_state_dict_pre_hooks) == 1  # ours was for once


def test_schedule_and_scaled_state_survive_together():
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, 1)
    scheduler.step()
    content = saved_and_loaded([optimizer.state_dict(), scheduler.state_dict()])
    other = copy.deepcopy(model)
    fresh = Celo2(other, LR, rule=RULE)
    schedule = torch.optim.lr_scheduler.StepLR(fresh, 1, 0.5)
    fresh.load_state_dict(content[0])
    schedule.load_state_dict(content[1])
    for m, o, s in ((model, optimizer, scheduler), (other, fresh, schedule)):
        train(m, o, 1)
        s.step()
        train(m, o, 1)
    assert_same(model, other)
