"""Configs and rules: what they hold and what they refuse."""

import dataclasses
import math
from typing import get_args

import numpy as np
import pytest

from celo2.metatrain import MetaConfig
from celo2.rule import (
    CELO2,
    CELO2_BASE,
    FEATURES,
    STARTS,
    Rule,
    RuleConfig,
    Start,
    feature_count,
    feature_rows,
    feature_width,
    initial_weights,
    make_odd,
    weight_shapes,
    without_idle_units,
)


def test_default_rule_is_the_paper_s():
    assert CELO2 == RuleConfig((8, 8), (0.9, 0.99, 0.999), 0.95, (0.9, 0.99, 0.999))
    assert (CELO2.form, CELO2.norm, CELO2.orthogonalize, CELO2.vectors) == (
        "d",
        "norm",
        True,
        "adam",
    )
    assert CELO2_BASE == dataclasses.replace(CELO2, orthogonalize=False, vectors="rule")
    assert sum(math.prod(shape) for shape in weight_shapes(CELO2).values()) == 347


def test_feature_table_is_the_specified_one():
    widths = [feature_width(CELO2, feature) for feature in FEATURES]
    assert widths == [1, 1, 1, 3, 1, 3, 1, 3, 1, 3, 3, 3, 3, 3]
    assert [feature.matrices_only for feature in FEATURES] == [False] * 9 + [True] * 5
    assert feature_count(CELO2) == 30 and feature_count(CELO2, vector=True) == 15


@pytest.mark.parametrize("decays", [1, 2, 4])
def test_first_layer_has_a_row_per_feature_column(decays):
    config = RuleConfig(
        hidden=(5,), momentum_decays=(0.9,) * decays, factored_decays=(0.9,) * decays
    )
    columns = 6 + 8 * decays
    assert feature_count(config) == columns
    assert weight_shapes(config) == {"w0": (columns, 5), "b0": (5,), "w1": (5, 3), "b1": (3,)}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("form", "m", "form='m' is not one of d, d_exp_m, d_exp_m_avg"),
        ("norm", "rms", "norm='rms' is not one of raw, norm, norm_clip, rolling_norm, rolling"),
        ("vectors", "sgd", "vectors='sgd' is not one of adam, rule"),
        ("hidden", (), "hidden=.. must be a non-empty tuple"),
        ("hidden", (8, 0), "must hold integers from 1 to 4096"),
        ("hidden", (8, True), "must hold integers"),
        ("hidden", (8.0,), "must hold integers"),
        ("hidden", "88", "must be a non-empty tuple"),
        ("momentum_decays", (0.9,), "1 entries and factored_decays 3"),
        ("momentum_decays", (0.9, 0.99, 1.0), "decay 1.0 must be a number in"),
        ("factored_decays", (0.9, -0.1, 0.5), "decay -0.1 must be"),
        ("rms_decay", float("nan"), "decay nan must be"),
        ("rms_decay", "0.9", "decay '0.9' must be"),
        ("orthogonalize", 1, "orthogonalize=1 must be True or False"),
        ("gated", "yes", "gated='yes' must be True or False"),
        ("overshoot", 0.6, r"overshoot=0.6 must be a number in \[0, 0.5\]"),
    ],
)
def test_wrong_field_is_refused_with_its_value(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CELO2, **{field: value})


def test_lists_from_a_file_become_tuples():
    config = RuleConfig(hidden=[8, 8], momentum_decays=[0.9], factored_decays=[0.9])
    assert config.hidden == (8, 8) and hash(config)


def test_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CELO2.form = "d_exp_m"


def weights(**changes):
    new = initial_weights(CELO2, np.random.default_rng(0)) | changes
    return {name: w for name, w in new.items() if w is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b1": None}, "missing: b1; unknown: none"),
        ({"w3": np.zeros(1)}, "missing: none; unknown: w3"),
        ({"w0": np.zeros((32, 8))}, r"w0 has shape \(32, 8\) but this config needs \(30, 8\)"),
    ],
)
def test_rule_refuses_arrays_of_another_config(changes, message):
    with pytest.raises(ValueError, match=message):
        Rule(CELO2, weights(**changes))


def test_initial_weights_are_cut_normals_and_zero_biases():
    config = dataclasses.replace(CELO2, hidden=(64, 64), gated=True)
    drawn = initial_weights(config, np.random.default_rng(0))
    assert {name: w.shape for name, w in drawn.items()} == weight_shapes(config)
    for name, w in drawn.items():
        assert w.dtype == np.float32
        if not name.startswith("w"):
            assert not w.any()
            continue
        scaled = w * math.sqrt(len(w))
        assert np.abs(scaled).max() <= 2 + 1e-6
        assert np.std(scaled) == pytest.approx(0.88, rel=0.1)  # of a normal cut at ±2


def test_initial_weights_follow_the_generator():
    same = [initial_weights(CELO2, np.random.default_rng(seed))["w0"] for seed in (0, 0, 1)]
    assert np.array_equal(same[0], same[1]) and not np.array_equal(same[0], same[2])


@pytest.mark.parametrize("hidden", [(8, 8), (2,), (4, 3, 5)])
@pytest.mark.parametrize("start", get_args(Start)[1:])
def test_start_makes_a_mix_of_features_the_direction(start, hidden):
    config = dataclasses.replace(CELO2, hidden=hidden)
    rng = np.random.default_rng(0)
    drawn = initial_weights(config, rng, start)
    features = rng.standard_normal((50, feature_count(config))).astype(np.float32)
    x = features
    for layer in range(len(hidden)):
        x = np.maximum(x @ drawn[f"w{layer}"] + drawn[f"b{layer}"], 0)
        assert (x[:, 2:] > 0).any() or hidden[layer] == 2  # the other units can learn
    x = x @ drawn[f"w{len(hidden)}"]
    expected = sum(
        c * features[:, feature_rows(config)[name].start + i]
        for name, coefficients in STARTS[start].items()
        for i, c in enumerate(coefficients)
    )
    np.testing.assert_allclose(x[:, 0], expected, rtol=1e-4, atol=1e-6)
    assert not x[:, 1:].any()


def test_start_needs_two_units_in_every_layer():
    config = dataclasses.replace(CELO2, hidden=(8, 1))
    with pytest.raises(ValueError, match=r"hidden=\(8, 1\) must be 2 or wider"):
        initial_weights(config, np.random.default_rng(0), "momentum")


def directions(config, drawn, x):
    for layer in range(len(config.hidden)):
        x = np.maximum(x @ drawn[f"w{layer}"] + drawn[f"b{layer}"], 0)
    return x @ drawn[f"w{len(config.hidden)}"] + drawn[f"b{len(config.hidden)}"]


@pytest.mark.parametrize("gate", [0.0, 0.7])
@pytest.mark.parametrize("hidden", [(8, 8), (2,), (4, 2, 6)])
def test_odd_rules_mirror_their_direction_and_keep_their_magnitude(hidden, gate):
    config = dataclasses.replace(CELO2, hidden=hidden, gated=True)
    rng = np.random.default_rng(0)
    drawn = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in weight_shapes(config).items()
    }
    odd = make_odd(config, drawn)
    odd["w0"] = odd["w0"] + np.float32(gate) * odd["g0"]
    signs = np.concatenate([[-1.0 if f.odd else 1.0] * feature_width(config, f) for f in FEATURES])
    x = rng.standard_normal((50, feature_count(config)))
    out, mirrored = directions(config, odd, x), directions(config, odd, signs * x)
    np.testing.assert_allclose(mirrored, [-1.0, 1.0, 1.0] * out, rtol=1e-4, atol=1e-4)
    assert np.abs(out).min() < 1 < np.abs(out).max()
    for name, w in make_odd(config, odd).items():
        np.testing.assert_array_equal(w, odd[name], err_msg=name)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("form", "hidden"), [("d", (2,)), ("d_exp_m", (3, 4))])
def test_rules_without_idle_units_give_the_same_outputs(form, hidden, gated):
    config = dataclasses.replace(CELO2, hidden=(4, 6), form=form, gated=gated)
    rng = np.random.default_rng(0)
    drawn = initial_weights(config, rng, "momentum")
    if gated:
        drawn["g0"] = rng.standard_normal(drawn["g0"].shape).astype(np.float32)
    if form == "d_exp_m":
        # Two units more, of which one reads one more of the first layer.
        drawn["w2"][[3, 5], 1] = 0.5
        drawn["w1"][:, [3, 5]] = np.eye(4, 2, k=-1)
        drawn["b1"][3] = 0.1
    else:
        drawn["w2"][:, 1:] = 1.0  # outputs that this form does not use
    smaller = without_idle_units(Rule(config, drawn))
    assert smaller.config == dataclasses.replace(config, hidden=hidden)
    x = rng.standard_normal((50, feature_count(config)))
    used = slice(1 if form == "d" else 2)
    for gate in (0.0, 0.7) if gated else (0.0,):
        before, after = (
            directions(c, {**w, "w0": w["w0"] + np.float32(gate) * w.get("g0", 0)}, x)[:, used]
            for c, w in ((config, drawn), (smaller.config, smaller.weights))
        )
        np.testing.assert_allclose(after, before, rtol=1e-12)


def test_layers_of_idle_units_keep_one():
    drawn = {name: np.zeros(shape, np.float32) for name, shape in weight_shapes(CELO2).items()}
    assert without_idle_units(Rule(CELO2, drawn)).config.hidden == (1, 1)


@pytest.mark.parametrize("start", get_args(Start)[1:])
def test_starts_of_known_directions_are_odd_already(start):
    drawn = initial_weights(CELO2, np.random.default_rng(0), start)
    x = np.random.default_rng(1).standard_normal((50, feature_count(CELO2)))
    np.testing.assert_allclose(
        directions(CELO2, make_odd(CELO2, drawn), x), directions(CELO2, drawn, x), atol=1e-6
    )


def test_odd_rules_need_units_in_pairs():
    config = dataclasses.replace(CELO2, hidden=(8, 3))
    with pytest.raises(ValueError, match=r"hidden=\(8, 3\) must be even for an odd rule"):
        make_odd(config, initial_weights(config, np.random.default_rng(0)))
    with pytest.raises(ValueError, match="units go in pairs"):
        MetaConfig(rule=config, odd=True)


def test_start_may_be_a_mix_of_one_s_own():
    drawn = initial_weights(CELO2, np.random.default_rng(0), {"momentum": [0.7, 0.3]})
    rows = feature_rows(CELO2)["momentum"]
    assert drawn["w0"][rows, 0].tolist() == pytest.approx([0.7, 0.3, 0.0])
    assert np.count_nonzero(drawn["w0"][:, 0]) == 2


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ("muon", "start='muon' is not one of random, momentum, "),
        ({"speed": [1.0]}, "'speed' is not a feature; there are gradient, "),
        ({"rms": [1.0, 2.0]}, "rms has 1 columns under this config, but the mix has 2"),
        ({"rms": [0.0]}, "finite coefficients, not all zero"),
        ({"rms": [math.nan]}, "finite coefficients, not all zero"),
        ({}, "finite coefficients, not all zero"),
    ],
)
def test_wrong_start_is_named(mix, message):
    with pytest.raises(ValueError, match=message):
        initial_weights(CELO2, np.random.default_rng(0), mix)
