"""Who updates what in Torch models, and which parameters are refused."""

import pytest
import torch
from torch import nn

from celo2.routing import MatrixView
from celo2.torch import Celo2
from small import SMALL_BASE, make_rule
from torch_models import Transformer

RULE, BASE = make_rule(), make_rule(SMALL_BASE, seed=1)
LINEAR = MatrixView((), (1,), (0,))
TABLE = MatrixView((), (0,), (1,))


def lines(params, **options) -> dict:
    """Name → line of the table."""
    return {line.path: line for line in Celo2(params, rule=RULE, **options).explain()}


def updaters(params, **options) -> dict[str, str]:
    """Name → why AdamW has it, or "rule"."""
    table = lines(params, **options)
    return {k: "rule" if v.updater == "rule" else v.reason for k, v in table.items()}


class ConvNet(nn.Module):
    """Convolutions, a norm, and a last layer of the given name."""

    def __init__(self, head: str = "fc"):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 4, 2)
        self.add_module(head, nn.Linear(4, 10))


class Conv1D(nn.Module):
    """As transformers' GPT-2 has it: a Linear that stores (in, out)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 24))


class Scaled(nn.Module):
    """Parameters of no known module."""

    def __init__(self):
        super().__init__()
        self.layer_scale = nn.Parameter(torch.ones(8, 1, 1))
        self.temperature = nn.Parameter(torch.ones(()))
        self.experts = nn.Parameter(torch.zeros(3, 6, 4))
        self.unused = nn.Parameter(torch.zeros(0, 4))


def test_transformer_is_routed_as_expected():
    assert updaters(Transformer(tied=False)) == {
        "wte.weight": "embedding",
        "wpe.weight": "embedding",
        "attn.in_proj_weight": "rule",
        "attn.in_proj_bias": "vector",
        "attn.out_proj.weight": "rule",
        "attn.out_proj.bias": "vector",
        "norm.weight": "vector",
        "norm.bias": "vector",
        "mlp.0.weight": "rule",
        "mlp.0.bias": "vector",
        "mlp.2.weight": "rule",
        "mlp.2.bias": "vector",
        "lm_head.weight": "output head",
    }
    table = lines(Transformer())
    assert "lm_head.weight" not in table  # it is wte.weight
    assert table["wte.weight"][2:4] == ("adam", "embedding")
    assert table["attn.in_proj_weight"].viewed == (8, 24)
    assert table["mlp.0.weight"].view == LINEAR and table["mlp.0.weight"].viewed == (8, 16)


@pytest.mark.parametrize("head", ["fc", "head", "classifier", "out"])
def test_convnet_is_routed_as_expected(head):
    table = lines(ConvNet(head))
    assert table["conv.weight"].updater == "rule" and table["conv.weight"].viewed == (27, 8)
    assert table["up.weight"].updater == "rule" and table["up.weight"].viewed == (32, 4)
    assert table["bn.weight"].reason == "vector"
    assert table[f"{head}.weight"][2:4] == ("adam", "output head")


def test_fc_that_is_not_the_last_layer_is_hidden():
    model = ConvNet("fc")
    model.add_module("last", nn.Linear(10, 2))
    assert updaters(model)["fc.weight"] == "rule"


def test_last_layer_of_a_sequential_is_the_head():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)), nn.Tanh())
    assert updaters(model)["0.weight"] == "rule"
    assert updaters(model)["1.1.weight"] == "output head"


def test_only_the_last_layer_of_a_classifier_is_the_head():
    model = nn.Module()
    model.features = nn.Sequential(nn.Conv2d(3, 4, 3))
    model.classifier = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 10))
    found = updaters(model)
    assert found["features.0.weight"] == found["classifier.0.weight"] == "rule"
    assert found["classifier.2.weight"] == "output head"


@pytest.mark.parametrize("model", [ConvNet(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))])
@pytest.mark.parametrize("wrappers", [["module"], ["_orig_mod"], ["module", "_orig_mod"]])
def test_wrapped_model_is_routed_as_the_model_itself(model, wrappers):
    """By DistributedDataParallel and by torch.compile."""
    wrapped = model
    for name in reversed(wrappers):
        inner, wrapped = wrapped, nn.Module()
        wrapped.add_module(name, inner)
    prefix = ".".join(wrappers) + "."
    assert updaters(wrapped) == {prefix + k: v for k, v in updaters(model).items()}


def test_modules_say_how_a_weight_is_seen():
    model = nn.ModuleDict(
        {
            "lstm": nn.LSTM(3, 4),
            "wide": Conv1D(),
            "line": nn.Conv1d(2, 5, 3),
            "stretch": nn.ConvTranspose1d(2, 5, 3),
            "bag": nn.EmbeddingBag(7, 3),
            "scaled": Scaled(),
        }
    )
    table = lines(model)
    assert table["lstm.weight_ih_l0"].updater == "rule"
    assert table["lstm.weight_ih_l0"].viewed == (3, 16)
    assert table["wide.weight"].view == TABLE and table["wide.weight"].viewed == (8, 24)
    assert table["line.weight"].viewed == (6, 5) and table["stretch.weight"].viewed == (6, 5)
    assert table["bag.weight"][2:5] == ("adam", "embedding", TABLE)
    assert table["scaled.experts"].viewed == (3, 4, 6)
    assert table["scaled.layer_scale"].reason == "vector"
    assert table["scaled.temperature"].reason == "single element"
    assert table["scaled.unused"].reason == "empty"


def test_conv1d_that_fsdp_subclassed_is_still_known():
    class FSDPConv1D(Conv1D):
        pass

    assert lines(nn.Sequential(FSDPConv1D()))["0.weight"].view == TABLE


def test_weights_of_two_layers_are_tied_but_a_layer_used_twice_is_not():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    assert updaters(model)["a.weight"] == "tied"
    layer = nn.Linear(4, 4)
    assert updaters(nn.ModuleDict({"a": layer, "b": layer}))["a.weight"] == "rule"


def test_names_alone_route_nearly_as_the_model_does():
    model = Transformer(tied=False)
    assert updaters(model.named_parameters()) == updaters(model)
    # What only the module knows is lost: this is no output head by its name.
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    assert updaters(list(model.named_parameters()))["1.weight"] == "rule"


def test_parameters_without_names_are_routed_by_shape_with_a_warning():
    model = Transformer(tied=False)
    with pytest.warns(UserWarning, match="parameters without names.*pass the model") as caught:
        optimizer = Celo2(model.parameters(), rule=RULE)
    assert caught[0].filename == __file__
    table = optimizer.explain()
    assert table[0].path == "parameter 0" and table[0].updater == "rule"
    assert {line.reason for line in table if line.updater == "adam"} == {"vector"}


def test_no_warning_where_names_would_change_nothing():
    params = list(Transformer().parameters())
    Celo2(params, rule=BASE)  # takes everything
    Celo2([p for p in params if p.ndim < 2], rule=RULE)
    Celo2([{"params": params, "updater": "rule"}], rule=RULE)


def test_base_takes_all_that_has_more_than_one_element():
    model = nn.ModuleDict({"scaled": Scaled(), "transformer": Transformer()})
    table = Celo2(model, rule=BASE).explain()
    adam = {line.path for line in table if line.updater == "adam"}
    assert adam == {"scaled.temperature", "scaled.unused"}
    assert {line.path: line.viewed for line in table}["scaled.layer_scale"] == (1, 8)


def test_overrides_go_by_name():
    view = MatrixView((2,), (0,), (1,))
    model = nn.ModuleDict({"conv": nn.Conv1d(4, 6, 3), "up": nn.Linear(4, 4), "wte": Scaled()})
    table = lines(model, overrides={r"^conv\.weight": view, "up|conv": "adam", "wte": "rule"})
    assert table["conv.weight"][3:5] == (r"override '^conv\\.weight'", view)
    assert table["conv.weight"].viewed == (3, 6, 4)
    assert table["up.weight"][2:4] == ("adam", "override 'up|conv'")
    assert table["wte.experts"].updater == "rule"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"decoder": "adam"}, "'decoder' matches no parameter; the paths are conv.weight, conv."),
        ({"(": "adam"}, "is not a regular expression"),
        ({"conv": "sgd"}, "'sgd' for conv.weight is not"),
        ({"conv.weight": LINEAR}, "conv.weight.* does not fit a tensor of 4 axes"),
    ],
)
def test_wrong_override_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        Celo2(ConvNet(), rule=RULE, overrides=overrides)


def test_overrides_without_names_are_refused():
    params = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(ValueError, match="overrides go by name, but .* without names"):
        Celo2(params, rule=RULE, overrides={"weight": "rule"})


def test_table_is_printed():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(4, 2, bias=False))
    header, _, *rows, last = str(Celo2(model, rule=RULE).explain()).splitlines()
    assert header.split() == "path shape updated by because seen as share".split()
    assert [row.split() for row in rows] == [
        ["0.weight", "4×2×3×3", "celo2", "matrix", "18×4", "85.7%"],
        ["0.bias", "4", "AdamW", "vector", "-", "4.8%"],
        ["1.weight", "2×4", "AdamW", "output", "head", "-", "9.5%"],
    ]
    assert last == "celo2 updates 85.7% of 84 parameters."
