import json
import math
from pathlib import Path

import pytest

from celo2.metatrain.config import PRESETS, MetaConfig, from_fields, read_toml
from celo2.rule import CELO2_BASE, RuleConfig
from celo2.runs.fields import differences, to_fields

RULES = Path(__file__).parents[2] / "rules"


@pytest.mark.parametrize(
    "config",
    [
        *PRESETS.values(),
        MetaConfig(datasets=("mnist", "svhn"), unroll=(50, 50), rule=RuleConfig(hidden=(4,))),
    ],
)
def test_config_survives_json(config):
    assert from_fields(json.loads(json.dumps(to_fields(config)))) == config


def test_toml_changes_the_fields_it_names(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text('problems = 2\nsigma = 1\n[rule]\nhidden = [4]\nform = "d_exp_m"\n')
    config = read_toml(path, PRESETS["celo2-base"])
    assert (config.problems, config.sigma, type(config.sigma)) == (2, 1.0, float)
    assert config.rule == RuleConfig((4,), form="d_exp_m", orthogonalize=False, vectors="rule")
    assert config.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("problem = 2", "problem is not a field; there are rule, start, start_mix, odd, "),
        ("[rule]\nwidth = 3", "rule.width is not a field; there are rule.hidden"),
        ('problems = "2"', "problems='2' is not of type int"),
        ("problems = true", "problems=True is not of type int"),
        ("unroll = [1, 2, 3]", r"unroll=\[1, 2, 3\] is not of type tuple\[int, int\]"),
        ("rule = 3", "rule=3 is not of type RuleConfig"),
        ('decay = "linear"', "decay='linear' is not one of constant, cosine"),
        ("problems = ", "Invalid value"),
    ],
)
def test_mistakes_in_toml_are_named_with_the_file(text, message, tmp_path):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ValueError, match=f"bad.toml: .*{message}"):
        read_toml(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": -1}, "seed=-1 must be from 0 to"),
        ({"warmup": -1}, "warmup=-1 must be a number of at least 0"),
        ({"warmup": 50, "iterations": 50, "decay": "cosine"}, "warmup=50 .* iterations=50"),
        ({"adam_multiplier": -1.0}, "adam_multiplier=-1.0 must be a number of at least 0"),
        ({"weight_decay": math.nan}, "weight_decay=nan must be"),
        ({"loss_limit": math.inf}, "loss_limit=inf must be"),
        ({"loss_limit": -2.0}, "loss_limit=-2.0 must be"),
    ],
)
def test_numbers_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MetaConfig(**fields)


def test_warm_up_may_fill_a_run_at_a_constant_rate():
    assert MetaConfig(warmup=50, iterations=50).warmup == 50


def test_differences_name_nested_fields():
    found = differences(MetaConfig(seed=1), MetaConfig(rule=CELO2_BASE))
    assert found == {
        "seed": (1, 0),
        "rule.orthogonalize": (True, False),
        "rule.vectors": ("adam", "rule"),
    }
    assert differences(MetaConfig(), MetaConfig()) == {}


@pytest.mark.parametrize("path", sorted(RULES.glob("*.toml")), ids=lambda path: path.stem)
def test_config_file_of_a_rule_is_read_and_names_its_command(path):
    config = read_toml(path)
    assert config.families and config.seed
    command = path.read_text("utf-8").splitlines()[0]
    assert f"--config rules/{path.name}" in command
