import dataclasses
import math

import numpy as np
import pytest

import celo2
from celo2 import rulefile
from celo2.velo import CELO, VELO, VeloConfig, VeloRule, initial_velo_weights, velo_shapes
from lstm_rules import SMALL, random_rule
from rule_files import edit_config, rewrite, same


@pytest.mark.parametrize(("config", "count"), [(VELO, 2_320_385), (CELO, 37_089)])
def test_official_sizes_have_the_published_number_of_weights(config, count):
    assert sum(map(math.prod, velo_shapes(config).values())) == count


def test_initial_weights_are_the_published_initialiser_s():
    weights = initial_velo_weights(CELO, np.random.default_rng(0))
    VeloRule(CELO, weights)
    for name, array in weights.items():
        if not (name.endswith(".w") or name in ("w0", "w1", "w2")):
            assert not array.any(), name
    scaled = weights["lstm.w"] * math.sqrt(128)
    assert 1.9 < np.abs(scaled).max() <= 2 and abs(scaled.std() - 0.88) < 0.02
    assert np.abs(weights["w0"]).max() <= 2 / math.sqrt(30)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "adam"}, "optimizer='adam' is not one of velo, celo"),
        ({"lstm": 0}, "lstm=0 must be an integer from 1 up"),
        ({"banks": 2.0}, "banks=2.0 must be an integer"),
        ({"loss_horizon": True}, "loss_horizon=True must be an integer"),
        ({"bank_scale": math.inf}, "bank_scale=inf must be a positive number"),
        ({"optimizer": "celo"}, "Celo has one MLP"),
    ],
)
def test_bad_config_is_refused_with_the_value(fields, message):
    with pytest.raises(ValueError, match=message):
        VeloConfig(**fields)


def test_weights_of_other_widths_are_refused():
    weights = dict(random_rule(SMALL["velo"]).weights)
    with pytest.raises(ValueError, match=r"w0 has shape \(3, 30, 4\) but this config needs \(4, "):
        VeloRule(dataclasses.replace(SMALL["velo"], banks=4), weights)
    del weights["linear.w"]
    with pytest.raises(ValueError, match="rule for velo with lstm=8 .* missing: linear.w"):
        VeloRule(SMALL["velo"], weights)


@pytest.mark.parametrize("name", SMALL)
def test_rule_file_comes_back_and_says_whose_it_is(name, tmp_path):
    rule = dataclasses.replace(random_rule(SMALL[name]), origin={"by": "hand"})
    celo2.save(rule, tmp_path / "rule.safetensors")
    found = celo2.load(tmp_path / "rule.safetensors")
    assert isinstance(found, VeloRule) and same(found, rule)
    assert rulefile.optimizer_of(found) == name
    assert rulefile.digest(found) == rulefile.digest(rule)
    assert f"for celo2.jax.{name}" in rulefile.model_card(rule, "hf://ada/rule", "0" * 64)


def test_damaged_config_of_a_file_is_refused():
    data = rulefile.to_bytes(random_rule(SMALL["velo"]))
    for fields, message in (
        ({"optimizer": "adam"}, "not one of velo, celo"),
        ({"banks": "absent"}, "config fields missing: banks"),
        ({"width": 3}, "unknown config fields: width"),
        ({"lstm": 9}, "was it made with other widths"),
    ):
        with pytest.raises(ValueError, match=message):
            rulefile.from_bytes(rewrite(data, edit_config(**fields)), "file")


def test_checkpoint_in_place_of_a_rule_is_answered_with_convert():
    for start in (b"\x82", b"\x83"):
        with pytest.raises(ValueError, match="celo2 convert theta.state rule.safetensors"):
            rulefile.from_bytes(start + b"\xff" * 30, "theta.state")
