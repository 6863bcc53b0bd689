from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import RECIPE

from celo2.evaluate import read_recipe
from celo2.evaluate.recipe import choose, parse_recipe
from celo2.rule import CELO2_BASE


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


def test_recipe_is_the_product_of_rates_decays_and_seeds(recipe_file):
    recipe = read_recipe(recipe_file)
    adamw = [c for c in recipe.runs if c.label == "adamw"]
    plain = [c for c in recipe.runs if c.label == "plain"]
    assert [c.learning_rate for c in adamw] == [1e-3, 1e-2, 1e-1]
    assert {(c.optimizer, c.b1, c.clip) for c in plain} == {("sgd", 0.0, 1e30)}
    assert {(c.steps, c.batch, c.seed, c.evaluate_every) for c in recipe.runs} == {(6, 8, 0, 6)}
    assert recipe.name == "tiny"
    assert recipe.texts == {"command": "celo2 sweep this", "expect": "little"}
    many = parse_recipe(
        {"seeds": [0, 1], "tasks": {"digits-mlp": {}, "text-tiny": {}}}
        | {"optimizers": {"lion": {"learning_rate": 1e-3, "weight_decays": [0, 0.1]}}},
        "many",
    )
    assert len(many.runs) == 2 * 2 * 2


TRAINS = {
    "meta_train": {"preset": "celo2-base", "iterations": 7},
    "tasks": {"digits-mlp": {}},
    "optimizers": {
        "usual": {"meta_train": {}, "learning_rate": 1e-3},
        "same": {"meta_train": {"rule": {"rms_decay": 0.95}}, "learning_rate": 2e-3},
        "four": {"meta_train": {"rule": {"hidden": [4, 4]}}, "learning_rate": 1e-3},
        "test": {"meta_train": {}, "at_test": {"orthogonalize": True}, "learning_rate": 1e-3},
    },
}


def test_optimizers_whose_rules_are_trained_alike_share_one():
    recipe = parse_recipe(TRAINS, "ablations", "here")
    usual, same, four, test = (Path(config.optimizer) for config in recipe.runs)
    assert usual == same == Path("here/rules/celo2-base/rule.safetensors")
    assert four == Path("here/rules/celo2-base_hidden-4-4/rule.safetensors")
    assert test == Path("here/rules/celo2-base/at-test_orthogonalize-True.safetensors")
    assert [rule.file for rule in recipe.rules] == [usual, four, test]
    base, wide, changed = recipe.rules
    assert (base.config.iterations, base.config.rule) == (7, CELO2_BASE)
    assert (wide.config.rule.hidden, changed.config) == ((4, 4), base.config)
    assert changed.used == replace(CELO2_BASE, orthogonalize=True)
    assert choose(recipe, ["four"]).rules == (wide,)
    elsewhere = parse_recipe(TRAINS, "ablations").runs[0].optimizer
    assert elsewhere == str(Path("runs/ablations/rules/celo2-base/rule.safetensors"))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"at_test": {"norm": "raw"}}, "optimizers.x has at_test: a rule that is trained here has"),
        ({"meta_train": {}, "optimizer": "celo2"}, "has meta_train and optimizer"),
        ({"meta_train": {"rule": {"norm": "rms"}}}, "x.meta_train: norm='rms' is not one of"),
        ({"meta_train": {"iteration": 3}}, "iteration is not a field"),
        ({"meta_train": {}, "at_test": {"size": 3}}, "at_test.size is not a field"),
    ],
)
def test_rule_that_cannot_be_trained_is_refused(table, message):
    content = {"tasks": {"digits-mlp": {}}, "optimizers": {"x": {"learning_rate": 1e-3} | table}}
    with pytest.raises(ValueError, match=message):
        parse_recipe(content, "wrong")


def test_unequal_budgets_are_told(recipe_file):
    (warning,) = read_recipe(recipe_file).warnings()
    assert "on digits-mlp" in warning and "adamw 3 runs, plain 2 runs" in warning


def test_velo_and_celo_are_one_run_unless_their_factor_is_swept(recipe_file):
    also = {"celo": "celo.safetensors", "mine": "velo=velo.safetensors"}
    recipe = read_recipe(recipe_file, also)
    further = [c for c in recipe.runs if c.label in also]
    assert [c.optimizer for c in further] == ["celo=celo.safetensors", "velo=velo.safetensors"]
    for config in further:
        assert (config.learning_rate, config.weight_decay) == (1e-3, 0.0)
        assert (config.schedule, config.warmup) == ("constant", 0.0)
    assert recipe.budgets()["digits-mlp"] == {"adamw": 3, "plain": 2, "celo": 1, "mine": 1}
    (warning,) = recipe.warnings()
    assert "celo" not in warning
    optimizers = {"adamw": {"learning_rate": 1e-3}}
    optimizers["velo"] = {"optimizer": "velo=a.safetensors", "learning_rates": [1e-3, 2e-3]}
    recipe = parse_recipe({"tasks": {"digits-mlp": {}}, "optimizers": optimizers}, "swept")
    (warning,) = recipe.warnings()
    assert "adamw 1 runs, velo 2 runs" in warning


def spaced(**span):
    return {"optimizers": {"adamw": {"learning_rates": span}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {}}, "'optimizer' is not one of command"),
        ({"tasks": {}}, r"there is no table \[tasks.NAME\]"),
        ({"seeds": "0"}, "seeds='0' is not a list of integers"),
        ({"optimizers": {"adamw": {}}}, "adamw on digits-mlp has no learning_rates"),
        ({"optimizers": {"adamw": {"learning_rates": ["a"]}}}, "is neither a list of numbers nor"),
        (
            {"optimizers": {"adamw": {"learning_rates": {"low": 1}}}},
            "is neither a list of numbers nor",
        ),
        (spaced(low="1e-3", high=1, count=2), "is neither a list of numbers nor"),
        (spaced(low=1e-3, high=1, count=2.0), "is neither a list of numbers nor"),
        (spaced(low=1e-3, high=1, count=0), "is neither a list of numbers nor"),
        ({"optimizers": {"learning_rate": 1e-3}}, "optimizers.learning_rate is not a table"),
        ({"optimizers": {"adamw": {"tasks": 3}}}, "optimizers.adamw is not a table"),
        ({"tasks": {"digits-mlp": 150}}, "tasks.digits-mlp is not a table"),
        ({"run": 3}, "run is not a table"),
        ({"run": {"seed": 5}}, "seeds are given at the top"),
        ({"tasks": {"digits-mlp": {"label": "x"}}}, "a label is the name of its table"),
        ({"optimizers": {"adamw": {"learning_rate": 1, "b3": 1}}}, "b3 is not a field"),
        ({"optimizers": {"adamw": {"learning_rate": -1}}}, "learning_rate=-1.0 must be"),
        ({"tasks": {"digit": {}}}, "'digit' is not a task"),
        (
            {"optimizers": {"adamw": {"learning_rate": 1, "tasks": {"x": {}}}}},
            "the recipe has no task 'x'",
        ),
    ],
)
def test_wrong_recipe_is_named(changes, message):
    base = {"tasks": {"digits-mlp": {}}, "optimizers": {"adamw": {"learning_rates": [1]}}}
    with pytest.raises(ValueError, match=message):
        parse_recipe(base | changes, "wrong")


def test_further_rule_is_tuned_as_celo2_is(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text("[tasks.digits-mlp]\n[optimizers.celo2]\nlearning_rates = [1e-3, 2e-3]\n")
    recipe = read_recipe(path, {"mine": "celo2-base"})
    assert [(c.label, c.optimizer, c.learning_rate) for c in recipe.runs] == [
        ("celo2", "celo2", 1e-3),
        ("celo2", "celo2", 2e-3),
        ("mine", "celo2-base", 1e-3),
        ("mine", "celo2-base", 2e-3),
    ]
    with pytest.raises(ValueError, match="an optimizer 'celo2' already"):
        read_recipe(path, {"celo2": "x.safetensors"})


def test_further_rule_needs_rates_of_celo2(recipe_file):
    with pytest.raises(ValueError, match="tuned as celo2 is, which the recipe has not"):
        read_recipe(recipe_file, {"mine": "celo2-base"})


def rates_and_decays(run=(), task=(), optimizer=(), both=()):
    content = {"run": dict(run), "tasks": {"digits-mlp": dict(task)}}
    wish = dict(optimizer) | {"tasks": {"digits-mlp": dict(both)}}
    runs = parse_recipe(content | {"optimizers": {"adamw": wish}}, "levels").runs
    return sorted({c.learning_rate for c in runs}), sorted({c.weight_decay for c in runs})


def test_nearer_level_counts_in_either_spelling():
    many, one = {"learning_rates": [1e-3, 2e-3]}, {"learning_rate": 9e-3}
    assert rates_and_decays(optimizer=many, both=one)[0] == [9e-3]
    assert rates_and_decays(optimizer=one, both=many)[0] == [1e-3, 2e-3]
    decays = {"weight_decays": [0.0, 0.1, 10.0]}
    assert rates_and_decays(run=decays, optimizer=one | {"weight_decay": 0.1})[1] == [0.1]
    assert rates_and_decays(run={"weight_decay": 0.1}, task=decays, optimizer=one)[1] == [
        0.0,
        0.1,
        10.0,
    ]
    with pytest.raises(ValueError, match="learning_rate and learning_rates are both given"):
        rates_and_decays(optimizer=one | many)


def test_unlike_work_is_told():
    tuned = {"learning_rate": 1e-3}
    optimizers = {"adamw": tuned, "celo2": tuned | {"steps": 5000, "clip": 1.0}}
    recipe = parse_recipe(
        {"tasks": {"digits-mlp": {"steps": 1000}}, "optimizers": optimizers}, "unlike"
    )
    (warning,) = recipe.warnings()
    assert "on digits-mlp steps differ (adamw 1000, celo2 5000)" in warning
