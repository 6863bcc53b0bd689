import importlib
import json

import pytest
from small_runs import RECIPE, of_kind, small, stop_after

from celo2 import cli
from celo2.evaluate import Recipe, read_recipe, summarize, sweep
from celo2.evaluate import run as run_one
from celo2.evaluate.comparison import Outcome, find_best, name_of
from celo2.evaluate.config import resolve
from celo2.runs import records

sweep_module = importlib.import_module("celo2.evaluate.sweep")


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


def scored(config, score, state="finished"):
    return Outcome("x", resolve(config), state, {"score": score, "diverged": score is None})


def test_only_some_optimizers_of_a_recipe_run(recipe_file, tmp_path, capsys):
    command = ["sweep", str(recipe_file), "--out", str(tmp_path / "runs"), "--only", "plain"]
    assert cli.main(command) == 0
    assert "adamw" not in capsys.readouterr().out
    assert all("_plain_" in path.name for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert cli.main([*command[:-1], "plian"]) != 0
    assert "'plian' is not one of adamw, plain" in capsys.readouterr().err
    assert cli.main(["sweep", str(recipe_file), "--also", "rule.safetensors"]) != 0
    assert "is not LABEL=RULE" in capsys.readouterr().err


def test_index_keeps_what_other_parts_of_the_sweep_wrote(recipe_file, tmp_path, capsys):
    for label in ("plain", "adamw"):
        command = ["sweep", str(recipe_file), "--out", str(tmp_path / "runs"), "--only", label]
        assert cli.main(command) == 0
    index = json.loads((tmp_path / "runs" / "sweep.json").read_text())
    assert {fields["label"] for fields in index["tuning"].values()} == {"plain", "adamw"}
    assert len(index["tuning"]) == 5 and len(index["final"]) == 4


def test_sweep_that_is_stopped_at_once_keeps_its_final_seeds(recipe_file, tmp_path):
    recipe = read_recipe(recipe_file)
    list(sweep(recipe, tmp_path))
    before = json.loads((tmp_path / "sweep.json").read_text())
    assert list(sweep(recipe, tmp_path, stop=lambda: True)) == []
    assert json.loads((tmp_path / "sweep.json").read_text()) == before


def test_run_without_an_end_has_failed_unless_it_was_stopped(tmp_path, monkeypatch):
    recipe = Recipe("one", (resolve(small(steps=2)),))
    monkeypatch.setattr(sweep_module, "run", lambda *args, **options: iter(()))
    (outcome,) = sweep(recipe, tmp_path)
    assert outcome.state == "failed" and "without a record" in str(outcome.error)


def test_best_is_the_lowest_mean_over_seeds_and_never_a_diverged_run():
    outcomes = [
        scored(small(seed=0), 1.0),
        scored(small(seed=1), 3.0),
        scored(small(learning_rate=2e-2, seed=0), 1.5),
        scored(small(learning_rate=2e-2, seed=1), 1.7),
        scored(small(learning_rate=4e-2, seed=0), 0.1),
        scored(small(learning_rate=4e-2, seed=1), None, "diverged"),
    ]
    best = find_best(outcomes)["digits-mlp", "adamw"]
    assert best.config.learning_rate == 2e-2 and best.score == pytest.approx(1.6)
    assert (best.runs, best.diverged) == (6, 1)
    assert find_best(outcomes[-1:])["digits-mlp", "adamw"].score is None


def test_best_is_the_highest_where_higher_is_better():
    from celo2.evaluate import RunConfig

    runs = [RunConfig("minatar-freeway", "adamw", learning_rate=r) for r in (1e-3, 2e-3)]
    best = find_best([scored(runs[0], 5.0), scored(runs[1], 40.0)])
    assert best["minatar-freeway", "adamw"].score == 40.0


def test_sweep_makes_all_runs_then_the_best_with_the_final_seeds(recipe_file, tmp_path):
    recipe, out = read_recipe(recipe_file), tmp_path / "out"
    outcomes = list(sweep(recipe, out))
    tuning, finals = outcomes[:5], outcomes[5:]
    assert [o.config for o in tuning] == list(recipe.runs)
    states = {o.config.learning_rate: o.state for o in tuning if o.config.label == "plain"}
    assert states == {1e-2: "finished", 1e30: "diverged"}
    best = summarize(recipe, out)
    assert {o.config.seed for o in finals} == {1} and len(finals) == 2
    for label in ("adamw", "plain"):
        found = best["digits-mlp", label]
        assert len(found.final_scores) == 2 and found.final_scores[0] == found.score
    index = json.loads((out / "sweep.json").read_text())
    assert len(index["tuning"]) == 5 and len(index["final"]) == 4
    assert all((out / name / "records.jsonl").is_file() for name in index["final"])

    again = list(sweep(recipe, out))
    assert not any(o.fresh for o in again)
    assert [(o.config, o.score) for o in again] == [(o.config, o.score) for o in outcomes]


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


def test_command_shows_the_table_and_skips_what_is_done(recipe_file, tmp_path, capsys):
    pytest.importorskip("tyro")
    command = ["sweep", str(recipe_file), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    captured = capsys.readouterr()
    assert "different tuning budgets" in captured.err and "diverged" in captured.err
    header, adamw, plain, page = captured.out.splitlines()
    assert page == str(tmp_path / "out" / "report.html")
    assert header.split()[:3] == ["task", "optimizer", "runs"]
    assert adamw.split()[:4] == ["digits-mlp", "adamw", "3", "0"] and adamw.endswith("of 2")
    assert plain.split()[:4] == ["digits-mlp", "plain", "2", "1"]
    assert cli.main(command) == 0
    captured = capsys.readouterr()
    assert captured.err.count("(before)") == 7 and captured.out.splitlines()[1] == adamw


def test_packed_sweep_reports_the_same_and_its_runs_are_not_made_again(
    recipe_file, tmp_path, capsys
):
    first, second, packed = tmp_path / "first", tmp_path / "second", tmp_path / "all.jsonl"
    assert cli.main(["sweep", str(recipe_file), "--out", str(first)]) == 0
    assert cli.main(["report", str(first), "--pack", str(packed)]) == 0
    assert cli.main(["report", str(packed)]) == 0
    assert (first / "report.html").read_text() == (tmp_path / "all.html").read_text()
    capsys.readouterr()
    command = ["sweep", str(recipe_file), "--out", str(second), "--known", str(packed)]
    assert cli.main(command) == 0
    told = capsys.readouterr().err
    assert "7 runs taken from" in told
    assert all("(before)" in line for line in told.splitlines() if " of 7 " in line)


def test_file_that_is_no_packed_sweep_is_refused(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"kind": "start"}\n')
    assert cli.main(["report", str(tmp_path / "rows.jsonl")]) != 0
    assert "is not a packed sweep" in capsys.readouterr().err


def test_dry_run_shows_texts_and_sizes_and_writes_nothing(recipe_file, tmp_path, capsys):
    pytest.importorskip("tyro")
    out = tmp_path / "out"
    assert cli.main(["sweep", str(recipe_file), "--out", str(out), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "celo2 sweep this" in text and "little" in text
    assert "2,410 in 4 tensors" in text and "digits-mlp with plain" in text
    assert not out.exists()
