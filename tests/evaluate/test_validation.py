import json
import math
from statistics import fmean, variance

import numpy as np
import pytest
from small_runs import small

import celo2
from celo2 import cli
from celo2.evaluate import read_recipe, validation
from celo2.evaluate.comparison import Outcome, compare
from celo2.evaluate.config import resolve
from celo2.evaluate.validation import FILES, as_table, default_size, relative_score
from celo2.evaluate.validation import validation_recipe as recipe_for
from celo2.rule import CELO2, Rule, initial_weights
from small import SMALL_BASE, make_rule

# The tasks of the README's tables, on which no rule may be chosen.
TEST_TASKS = {"lm-0.8m", "lm-1m", "vit-tiny-cifar10", "conv-cifar10"}
TINY = """
final_seeds = [0, 1]
[run]
steps = 4
batch = 8
evaluation_batches = 2
weight_decay = 0.1
[tasks.digits-mlp]
[optimizers.adamw]
learning_rates = [1e-3, 1e-2]
[optimizers.muon]
learning_rates = [1e-3, 1e-2]
[optimizers.celo2]
learning_rates = [1e-3, 1e-2]
[optimizers.celo2-base]
learning_rates = [1e-3, 1e-2]
"""


def entries(scores: dict[str, list[float | None]]):
    """An optimizer's entries with these scores by task and seed."""
    runs = []
    for number, (task, row) in enumerate(scores.items()):
        for seed, score in enumerate(row):
            end = {"kind": "end", "finished": True, "score": score, "diverged": score is None}
            config = resolve(small(seed=seed, batch=number + 1))
            runs.append((task, Outcome(f"{task} {seed}", config, [end])))
    return {task: compare([r for t, r in runs if t == task])["digits-mlp"][0] for task in scores}


def test_score_is_the_mean_log_ratio_of_pairs_and_its_error_is_over_seeds():
    ours, theirs = {"a": [1.0, 2.0, 3.0], "b": [0.5, 0.5, 0.6]}, {"a": [2.0] * 3, "b": [1.0] * 3}
    logs = {t: [math.log(x / y) for x, y in zip(ours[t], theirs[t], strict=True)] for t in ours}
    found = relative_score(entries(ours), entries(theirs))
    assert found["score"] == pytest.approx(fmean(fmean(row) for row in logs.values()))
    error = math.sqrt(sum(variance(row) / 3 for row in logs.values())) / 2
    assert found["error"] == pytest.approx(error)
    back = relative_score(entries(theirs), entries(ours))
    assert back["score"] == pytest.approx(-found["score"]) and back["error"] == pytest.approx(error)


def test_what_all_seeds_share_is_no_error():
    # Seeds differ by a factor that both have: the pairs do not.
    ours, theirs = {"a": [1.0, 2.0]}, {"a": [2.0, 4.0]}
    found = relative_score(entries(ours), entries(theirs))
    assert found == {"score": pytest.approx(math.log(0.5)), "error": pytest.approx(0.0)}


@pytest.mark.parametrize("lost", [[1.0, None], [None, None]])
def test_optimizer_without_a_score_has_no_relative_one(lost):
    none = {"score": None, "error": None}
    assert relative_score(entries({"a": lost}), entries({"a": [1.0, 1.0]})) == none
    assert relative_score(entries({"a": [1.0, 1.0]}), entries({"a": lost})) == none


def test_one_seed_has_no_error():
    assert relative_score(entries({"a": [2.0]}), entries({"a": [1.0]})) == {
        "score": pytest.approx(math.log(2)),
        "error": None,
    }


@pytest.mark.parametrize("size", ["quick", "full"])
def test_suite_is_fair_and_apart_from_the_tasks_that_test_a_rule(size):
    recipe = read_recipe(FILES[size])
    assert recipe.warnings() == [] and len(recipe.final_seeds) >= 2
    tasks = set(recipe.by_task())
    assert not tasks & TEST_TASKS and not any("28" in task for task in tasks)
    for config in recipe.runs:
        assert (config.weight_decay, config.warmup, config.schedule) == (0.1, 0.05, "cosine")
        assert size == "full" or config.text is None


def test_ranges_of_rules_and_muon_are_equally_wide_and_in_proportion():
    runs = read_recipe(FILES["full"]).runs
    for task in {config.task for config in runs}:
        rates = {
            label: [c.learning_rate for c in runs if (c.task, c.label) == (task, label)]
            for label in ("celo2", "muon", "adamw")
        }
        assert rates["muon"] == pytest.approx([5 * rate for rate in rates["celo2"]], rel=0.01)
        assert len(rates["adamw"]) == len(rates["celo2"])


def test_size_and_text_go_by_what_the_data_folder_has(tmp_path):
    assert default_size(tmp_path) == "quick"
    for name in ("svhn.npz", "svhn_8x8.npz"):
        (tmp_path / name).touch()
    assert default_size(tmp_path) == "full"
    assert {c.text for c in recipe_for(["celo2"], "full", data=tmp_path).runs} == {None}
    for split in ("train", "val"):
        (tmp_path / f"tinyshakespeare_{split}.txt.xz").touch()
    texts = {c.task: c.text for c in recipe_for(["celo2"], "full", data=tmp_path).runs}
    assert texts["text-tiny"] == texts["lm-tiny"] == "tinyshakespeare"
    assert texts["vit-svhn"] is None


def test_rules_are_tuned_as_celo2_and_only_they_get_another_adam(tmp_path):
    path = str(tmp_path / "mine.safetensors")
    celo2.save(Rule(CELO2, initial_weights(CELO2, np.random.default_rng(0))), path)
    plain = recipe_for([path, "celo2", "muon"], "quick")
    assert list(plain.budgets()["text-tiny"]) == ["muon", "celo2", path]
    rates = {
        label: [c.learning_rate for c in plain.runs if c.label == label]
        for label in (path, "celo2")
    }
    assert rates[path] == rates["celo2"]
    assert list(recipe_for([path], "quick").budgets()["text-tiny"]) == [path]
    other = recipe_for([path, "muon"], "quick", adam_multiplier=3.0)
    assert {(c.label, c.adam_multiplier) for c in other.runs} == {(path, 3.0), ("muon", None)}


@pytest.mark.parametrize("size", ["quick", "full"])
def test_rule_without_newton_schulz_is_tuned_at_lower_rates(tmp_path, size):
    path = str(tmp_path / "mine.safetensors")
    celo2.save(make_rule(SMALL_BASE), path)
    for row in recipe_for([path, "celo2-base", "celo2"], size).by_task().values():
        best = {c.label: max(d.learning_rate for d in row if d.label == c.label) for c in row}
        assert best[path] == best["celo2-base"] < best["celo2"]


@pytest.mark.parametrize(
    ("label", "message"),
    [("adamx", "'adamx' is none of"), ("lion", "'lion' is neither adamw nor muon nor a rule")],
)
def test_what_is_no_rule_is_refused(label, message):
    with pytest.raises(ValueError, match=message):
        recipe_for([label], "quick")


@pytest.fixture
def tiny_suite(tmp_path, monkeypatch):
    """A rule file in the current folder, and a suite of one small task."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    monkeypatch.setattr(validation, "FILES", {"quick": path, "full": path})
    monkeypatch.setenv("CELO2_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    celo2.save(make_rule(), "mine.safetensors")


@pytest.mark.usefixtures("tiny_suite")
def test_try_compares_a_rule_and_makes_no_run_twice(capsys):
    assert cli.main(["try", "mine.safetensors", "--json", "--against", "adamw"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["size"] == "quick" and found["rule"] == "mine.safetensors"
    assert {k: found[k] for k in ("score", "error")} == found["against"]["adamw"]
    result = found["problems"]["digits-mlp"]
    assert len(result["seeds"]) == len(result["rates"]) == len(result["losses"]) == 2
    assert result["losses"][result["rates"].index(result["rate"])] == min(result["losses"])
    assert result["loss"] == pytest.approx(fmean(result["seeds"]))
    theirs = found["optimizers"]["adamw"]["problems"]["digits-mlp"]
    assert result["adamw"] == theirs["loss"]
    logs = [math.log(a / b) for a, b in zip(result["seeds"], theirs["seeds"], strict=True)]
    assert found["score"] == pytest.approx(fmean(logs))
    assert captured.err.count("(before)") == 0
    assert cli.main(["try", "mine.safetensors", "--against", " adamw"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("(before)") == 6
    head, task, *scores = captured.out.splitlines()
    assert head.split() == ["task", "mine.safetensors", "adamw"]
    assert task.startswith("digits-mlp") and f"{result['loss']:.4f} at" in task
    (score,) = scores
    assert score.startswith("log ratio to adamw") and "±" in score
    assert cli.main(["report", "runs/try-quick", "--pack", "known.jsonl"]) == 0
    capsys.readouterr()
    options = ["--against", "adamw", "--known", "known.jsonl", "--out", "other"]
    assert cli.main(["try", "mine.safetensors", *options]) == 0
    captured = capsys.readouterr()
    assert "6 runs taken from known.jsonl" in captured.err
    assert captured.err.count("(before)") == 6
    assert captured.out.splitlines() == [head, task, *scores]


@pytest.mark.usefixtures("tiny_suite")
def test_try_that_fails_says_why(capsys, monkeypatch):
    monkeypatch.setattr("celo2.evaluate.training.build_program", lambda *_: 1 / 0)
    assert cli.main(["try", "mine.safetensors", "--against", ""]) == 2
    assert "failed: ZeroDivisionError" in capsys.readouterr().err.splitlines()[-1]


def test_table_shows_what_diverged():
    lost = {"loss": None, "rate": 0.1}
    result = {"rule": "mine", "problems": {"a": lost}, "against": {}, "optimizers": {}}
    assert as_table(result).splitlines()[1].split() == ["a", "diverged"]
