import json

import numpy as np
import pytest
from small_runs import RECIPE, of_kind, small, stop_after
from tiny_runs import shared_build, tiny

from celo2.evaluate import Recipe, read_recipe, sweep
from celo2.evaluate import run as run_one
from celo2.evaluate.comparison import name_of, read_sweep
from celo2.evaluate.config import resolve
from celo2.evaluate.recipe import parse_recipe
from celo2.evaluate.sweeps import make_rules
from celo2.rulefile import load
from celo2.runs import records
from celo2.runs.fields import to_fields


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


def test_sweep_that_is_stopped_at_once_keeps_its_final_seeds(recipe_file, tmp_path):
    recipe = read_recipe(recipe_file)
    list(sweep(recipe, tmp_path))
    before = json.loads((tmp_path / "sweep.json").read_text())
    assert list(sweep(recipe, tmp_path, stop=lambda: True)) == []
    assert json.loads((tmp_path / "sweep.json").read_text()) == before


def test_run_without_an_end_has_failed_unless_it_was_stopped(tmp_path, monkeypatch):
    recipe = Recipe("one", (resolve(small(steps=2)),))
    monkeypatch.setattr("celo2.evaluate.sweeps.run", lambda *args, **options: iter(()))
    (outcome,) = sweep(recipe, tmp_path)
    assert outcome.state == "failed" and "without a record" in str(outcome.error)


def test_sweep_makes_all_runs_then_the_best_with_the_final_seeds(recipe_file, tmp_path):
    recipe, out = read_recipe(recipe_file), tmp_path / "out"
    outcomes = list(sweep(recipe, out))
    tuning, finals = outcomes[:5], outcomes[5:]
    assert [o.config for o in tuning] == list(recipe.runs)
    states = {o.config.learning_rate: o.state for o in tuning if o.config.label == "plain"}
    assert states == {1e-2: "finished", 1e30: "diverged"}
    assert {o.config.seed for o in finals} == {1} and len(finals) == 2
    for entry in read_sweep(out).tasks["digits-mlp"]:
        assert len(entry.seeds) == 2 and entry.seeds[0].score == entry.best.score
    index = json.loads((out / "sweep.json").read_text())
    assert len(index["tuning"]) == 5 and len(index["final"]) == 4
    assert all((out / name / "records.jsonl").is_file() for name in index["final"])

    again = list(sweep(recipe, out))
    assert not any(o.fresh for o in again)
    assert [(o.config, o.score) for o in again] == [(o.config, o.score) for o in outcomes]


def test_rules_of_a_recipe_are_trained_once_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr("celo2.metatrain.loop.build", shared_build)
    tables = {"usual": {}, "test": {"at_test": {"norm": "raw"}}}
    content = {
        "meta_train": {**to_fields(tiny(iterations=20)), "preset": "celo2"},
        "tasks": {"digits-mlp": {}},
        "optimizers": {
            label: {"meta_train": {}, "learning_rate": 1e-3} | table
            for label, table in tables.items()
        },
    }
    recipe = parse_recipe(content, "rules", tmp_path)
    assert list(make_rules(recipe.rules, stop=stop_after(2))) == []
    assert load(recipe.rules[0].file).origin["iterations"] == 10
    made = list(make_rules(recipe.rules))
    assert [(found.rule, found.error) for found in made] == [(r, None) for r in recipe.rules]
    usual, test = (load(config.optimizer) for config in recipe.runs)
    assert (usual.config.norm, test.config.norm) == ("norm", "raw")
    assert usual.origin["iterations"] == 20
    for name, weight in usual.weights.items():
        np.testing.assert_array_equal(weight, test.weights[name])
    before = recipe.rules[0].file.stat().st_mtime_ns
    assert len(list(make_rules(recipe.rules, first=1))) == 2
    assert recipe.rules[0].file.stat().st_mtime_ns == before


def test_broken_run_is_resumed_and_finished_ones_are_left_alone(recipe_file, tmp_path):
    recipe = read_recipe(recipe_file)
    done, broken = recipe.runs[0], recipe.runs[1]
    list(run_one(done, tmp_path / name_of(done)))
    before = (tmp_path / name_of(done) / "records.jsonl").stat().st_mtime_ns
    list(run_one(broken, tmp_path / name_of(broken), stop=stop_after(0)))
    list(sweep(recipe, tmp_path))
    assert (tmp_path / name_of(done) / "records.jsonl").stat().st_mtime_ns == before
    rows = records.read(tmp_path / name_of(broken) / "records.jsonl")
    assert len(of_kind(rows, "start")) == 1 and rows[-1]["kind"] == "end"


def test_failing_run_does_not_stop_the_sweep_and_is_tried_again(tmp_path, monkeypatch):
    (tmp_path / "failing_optimizers.py").write_text(
        "import optax\nbroken = True\n"
        "def make(schedule, weight_decay):\n"
        "    if broken:\n        raise RuntimeError('no such luck')\n"
        "    return optax.sgd(schedule)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    runs = (small("failing_optimizers:make", steps=2), small("sgd", steps=2))
    recipe = Recipe("failing", tuple(map(resolve, runs)))
    first, second = sweep(recipe, tmp_path / "out")
    assert (first.state, second.state) == ("failed", "finished")
    assert first.error == "RuntimeError: no such luck"
    import failing_optimizers

    failing_optimizers.broken = False
    assert [o.state for o in sweep(recipe, tmp_path / "out")] == ["finished", "finished"]


def test_stopped_sweep_goes_on_where_it_was(recipe_file, tmp_path):
    recipe = read_recipe(recipe_file)
    assert len(list(sweep(recipe, tmp_path, stop=stop_after(4)))) < 5
    assert len(list(sweep(recipe, tmp_path))) == 7
