"""Which layer is the output, inside wrappers, parameter groups and parametrizations."""

import pytest
import torch
from test_modules import LINEAR, RULE, TABLE, ConvNet, lines, updaters
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from celo2.routing import MatrixView, vector_view
from celo2.torch import Celo2

HEAD = "output head"


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def holding(**children: nn.Module | nn.Parameter) -> nn.Module:
    """A module with these children and parameters."""
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def heads(params, **options) -> list[str]:
    return [name for name, why in updaters(params, **options).items() if why == HEAD]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (holding(model=ConvNet(), loss=nn.CrossEntropyLoss()), "model.fc.weight"),
        (holding(backbone=ConvNet()), "backbone.fc.weight"),
        (holding(model=ConvNet(), loss=holding(s=nn.Parameter(torch.ones(2)))), "model.fc.weight"),
        (holding(base_model=holding(model=ConvNet("score"))), "base_model.model.score.weight"),
        (holding(net=mlp()), "net.2.weight"),
        (holding(net=mlp(), loss=nn.MSELoss()), "net.2.weight"),
        (holding(model=holding(net=mlp())), "model.net.2.weight"),
        (holding(classifier=mlp()), "classifier.2.weight"),
        (nn.Sequential(nn.Linear(4, 8), nn.ConvTranspose2d(8, 1, 2)), "1.weight"),
    ],
)
def test_wrapper_does_not_hide_the_output_head(model, expected):
    assert heads(model) == [expected]
    assert heads([{"params": model}]) == [expected]


def test_layer_that_peft_saves_with_its_adapter_is_the_output_head():
    score = holding(
        original_module=nn.Linear(4, 2), modules_to_save=nn.ModuleDict({"default": nn.Linear(4, 2)})
    )
    model = holding(base_model=holding(model=holding(body=nn.Linear(4, 4), score=score)))
    assert heads(model) == ["base_model.model.score.modules_to_save.default.weight"]


@pytest.mark.parametrize(
    "model",
    [
        holding(a=mlp(), b=mlp()),
        holding(net=mlp(), gate=nn.Parameter(torch.ones(3))),
        holding(blocks=nn.ModuleList([nn.Linear(4, 4)])),
        holding(decoder=nn.ModuleDict({"up": nn.Linear(4, 4)}), tail=nn.Parameter(torch.ones(2))),
    ],
)
def test_last_layer_that_nothing_says_to_be_the_output_is_hidden(model):
    assert heads(model) == []


def test_last_layer_of_features_is_hidden_where_the_head_has_a_group_of_its_own():
    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3))
    for head, expected in ((nn.Linear(8, 2), "weight"), (mlp(), "2.weight")):
        assert heads([{"params": features}, {"params": head}]) == [expected]
    named = {"params": list(nn.Linear(8, 2).named_parameters(prefix="head"))}
    assert heads([{"params": features}, named]) == ["head.weight"]
    # Not the other way round either: a convolution is not taken for the end of a model in parts.
    assert heads([{"params": nn.Linear(8, 2)}, {"params": features}]) == []
    assert heads([{"params": ConvNet()}, {"params": [("scale", torch.ones(3))]}]) == ["fc.weight"]


def test_group_that_is_added_later_has_no_head_by_its_place():
    optimizer = Celo2(nn.Linear(4, 4), rule=RULE)
    optimizer.add_param_group({"params": mlp()})
    assert {line.reason for line in optimizer.explain()} == {"matrix", "vector"}


def test_frozen_parameters_that_are_not_floating_point_are_left_out():
    model = mlp()
    model.quantized = nn.Parameter(torch.zeros(3, 1, dtype=torch.uint8), requires_grad=False)
    model[0].weight.requires_grad_(False)
    for params in (model, [{"params": model}]):
        assert list(updaters(params)) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    model.waves = nn.Parameter(torch.zeros(3, 1, dtype=torch.complex64))
    with pytest.raises(TypeError, match="waves is torch.complex64"):
        Celo2(model, rule=RULE)


def test_layer_called_an_embedding_is_still_seen_as_a_linear():
    table = lines(holding(time_embedding=holding(linear_1=nn.Linear(4, 4)), out=nn.Linear(4, 2)))
    assert table["time_embedding.linear_1.weight"][2:5] == ("adam", "embedding", LINEAR)


NORMS = [parametrizations.weight_norm, parametrizations.spectral_norm, spectral_norm, weight_norm]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__module__ + "." + norm.__name__)
def test_parametrized_weight_keeps_its_view_and_its_route(norm):
    layers = nn.Embedding(5, 4), nn.ConvTranspose2d(4, 6, 2), nn.Linear(6, 6), nn.Linear(6, 3)
    table = lines(nn.Sequential(*[norm(layer) for layer in layers]))
    found = {}
    for line in table.values():
        if line.shape in ((5, 4), (4, 6, 2, 2), (6, 6), (3, 6)):
            found[line.shape] = line[2:5]
        else:  # lengths and biases
            assert line[2:5] == ("adam", "vector", vector_view(len(line.shape))), line
    assert found == {
        (5, 4): ("adam", "embedding", TABLE),
        (4, 6, 2, 2): ("rule", "matrix", MatrixView((), (0, 2, 3), (1,))),
        (6, 6): ("rule", "matrix", LINEAR),
        (3, 6): ("adam", HEAD, LINEAR),
    }
    assert len(table) == (11 if "weight_norm" in norm.__name__ else 7)


def test_lengths_of_weight_norm_are_vectors_by_their_name_too():
    model = nn.ModuleList([parametrizations.weight_norm(nn.Conv1d(2, 4, 1))])
    assert updaters(model.named_parameters())["0.parametrizations.weight.original0"] == "vector"
    assert updaters([("lstm.weight_hh_l0_g", torch.ones(8, 1))])["lstm.weight_hh_l0_g"] == "vector"


def test_parametrized_tensor_of_an_unknown_module_goes_by_its_name():
    model = holding(experts=nn.Parameter(torch.zeros(3, 6, 4)))
    nn.utils.parametrize.register_parametrization(model, "experts", nn.Identity())
    assert lines(model)["parametrizations.experts.original"].viewed == (3, 4, 6)


@pytest.mark.parametrize("name", ["gate_up_proj_bias", "bias", "post_norm.weight"])
def test_stack_of_vectors_goes_to_adam(name):
    for shape, view in (((3, 8), MatrixView((0,), (), (1,))), ((8,), vector_view(1))):
        table = lines([(f"mlp.experts.{name}", torch.zeros(shape)), ("ssm.B", torch.zeros(3, 8))])
        assert table[f"mlp.experts.{name}"][2:5] == ("adam", "vector", view)
        assert table["ssm.B"].updater == "rule"
