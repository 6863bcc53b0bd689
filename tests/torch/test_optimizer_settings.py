"""Settings of parameter groups, and what is refused: parameters, settings."""

import pytest
import torch
from torch import nn

from celo2.rule import ADAM_MULTIPLIER
from celo2.torch import Celo2
from small import SMALL_BASE, make_rule
from torch_models import Transformer

RULE, BASE = make_rule(), make_rule(SMALL_BASE, seed=1)


def test_groups_have_settings_of_their_own():
    model = Transformer(tied=False)
    optimizer = Celo2(
        [
            {"params": model.attn, "lr": 1e-3, "weight_decay": 0.1, "rms_scale": 0.2},
            {"params": model.mlp.named_parameters(), "rule": BASE, "betas": (0.8, 0.9)},
            {"params": list(model.wte.named_parameters()), "updater": "rule"},
            {"params": [("mask", nn.Parameter(torch.zeros(3, 3)))], "updater": "adam"},
        ],
        lr=1e-4,
        rule=RULE,
        adam_multiplier=5,
    )
    groups = optimizer.param_groups
    assert [group["lr"] for group in groups] == [1e-3, 1e-4, 1e-4, 1e-4]
    assert [group["weight_decay"] for group in groups] == [0.1, 0, 0, 0]
    assert {group["adam_multiplier"] for group in groups} == {5}
    assert groups[1]["rule"] != groups[0]["rule"] == groups[2]["rule"]
    found = {line.path: (line.updater, line.reason) for line in optimizer.explain()}
    assert found["in_proj_bias"] == ("adam", "vector")
    assert found["2.bias"] == ("rule", "vector")  # the rule of this group takes them
    assert found["weight"] == ("rule", "parameter group")
    assert found["mask"] == ("adam", "parameter group")


def test_settings_of_a_group_reach_the_step():
    shapes = (3, 4), (3, 4), (3,), (3,)
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.ones_like(param)
    Celo2(
        [
            {"params": [("a", params[0]), ("b", params[2])], "lr": 1e-2, "weight_decay": 0.5},
            {"params": [("c", params[1]), ("d", params[3])], "rms_scale": 0.5, "rule": BASE},
        ],
        lr=1e-3,
        rule=RULE,
        adam_nesterov=False,
    ).step()
    a, c, b, d = (1 - param.detach() for param in params)
    assert (a - 0.005).square().mean().sqrt() == pytest.approx(1e-2, rel=1e-3)
    # AdamW's weight decay and first step, at a multiple of the rate.
    assert torch.allclose(b, torch.tensor(1.5e-2 * ADAM_MULTIPLIER))
    for x in (c, d):
        assert x.square().mean().sqrt() == pytest.approx(5e-4, rel=1e-3)


class FlatParameter(nn.Parameter):
    """By its name what FSDP1 makes of a layer's parameters."""


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (nn.Sequential(nn.LazyLinear(3)), ValueError, "0.weight has no shape yet: run the model"),
        ([("a", FlatParameter(torch.zeros(8)))], ValueError, "a is flattened .* fully_shard"),
        (
            [("net._fsdp_wrapped_module.a", nn.Parameter(torch.zeros(8)))],
            ValueError,
            "is flattened by FullyShardedDataParallel",
        ),
        ([("a", torch.zeros(3, dtype=torch.int64))], TypeError, "real .* a is torch.int64"),
        ([torch.zeros(3, dtype=torch.complex64)], TypeError, "parameter 0 is torch.complex64"),
        (
            [("a", torch.zeros(3, 4).to(torch.float8_e4m3fn))],
            TypeError,
            "of 16 bits or more, but a is torch.float8_e4m3fn",
        ),
        (["weight"], TypeError, "updates tensors, but parameter 0 is a str"),
        ([nn.Linear(2, 2)], TypeError, "parameter 0 is a Linear"),
        ([], ValueError, "empty parameter list"),
        (nn.Sequential(nn.ReLU()), ValueError, "empty parameter list: the model has none"),
        ([{"params": {torch.zeros(3)}}], TypeError, "in a set have no order"),
        ([("a", torch.zeros(3)), torch.zeros(3)], ValueError, "missing: 1 of 2"),
        ([{"params": [torch.zeros(3)]}, torch.zeros(3)], TypeError, "is a dict, not a Tensor"),
        ([torch.zeros(3, requires_grad=True) * 2], ValueError, "non-leaf"),
    ],
)
def test_what_cannot_be_updated_is_refused(params, error, message):
    with pytest.raises(error, match=message):
        Celo2(params, rule=RULE)


@pytest.mark.parametrize("change", [lambda some: some.pop(), lambda some: some.append(some[0])])
def test_group_whose_list_of_parameters_was_changed_is_refused(change):
    model = nn.Linear(3, 4)
    optimizer = Celo2(model, rule=RULE)
    model(torch.ones(2, 3)).sum().backward()
    change(optimizer.param_groups[0]["params"])
    for use in (optimizer.step, optimizer.explain):
        with pytest.raises(RuntimeError, match="made with 2 parameters and has [13] now: add"):
            use()


def test_duplicates_in_several_groups_are_refused():
    param = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="more than one parameter group"):
        Celo2([{"params": [("a", param)]}, {"params": [("a", param)]}], rule=RULE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0 must not be negative"),
        ({"lr": float("nan")}, "lr=nan must not"),
        ({"lr": torch.ones(2)}, r"Tensor lr must be 1-element, but it has shape \(2,\)"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"scale": "norm"}, "scale='norm' is not one of rms, spectral"),
        ({"workspace": 0}, "workspace=0 must be a positive"),
        ({"kernel": "cuda"}, "kernel='cuda' is not"),
        ({"adam_multiplier": -1}, "adam_multiplier=-1"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be two numbers"),
        ({"betas": (0.9,)}, "betas=.* must be two"),
        ({"momentum_dtype": torch.int8}, "momentum_dtype=torch.int8 must be a floating-point"),
        ({"newton_schulz_dtype": "bfloat16"}, "newton_schulz_dtype='bfloat16' must be a floating"),
        ({"lr": None}, "lr=None must be a number"),
        ({"rms_scale": "0.2"}, "rms_scale='0.2' must be a number"),
        ({"betas": 0.9}, "betas=0.9 must be two numbers"),
        ({"betas": ("0.9", 0.95)}, "betas=.* must be two numbers"),
        ({"workspace": "1 GiB"}, "workspace='1 GiB' must be a positive"),
    ],
)
def test_wrong_settings_are_refused_for_all_and_for_a_group(settings, message):
    params = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(ValueError, match=message):
        Celo2(params, rule=RULE, **settings)
    with pytest.raises(ValueError, match=message):
        Celo2([{"params": params} | settings], rule=RULE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"updater": "sgd"}, "updater='sgd' is not"),
        ({"compile": True}, "compile is for all groups"),
        ({"overrides": {}}, "overrides is for all groups"),
    ],
)
def test_wrong_settings_of_a_group_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Celo2([{"params": [nn.Parameter(torch.zeros(3))]} | settings], rule=RULE)
