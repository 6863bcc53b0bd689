"""What records say: the best settings, what makes scores incomparable, packed sweeps."""

import dataclasses

import numpy as np
import pytest
from hand_made import config_of, example_sweep, rows_of, write_sweep
from small_runs import small

from celo2 import cli
from celo2.evaluate import RunConfig, comparison
from celo2.evaluate.comparison import (
    Outcome,
    bootstrap,
    caveats,
    compare,
    data_caveats,
    interquartile_mean,
    pack,
    reach,
    read_sweep,
    unpack,
    without_lost,
)
from celo2.evaluate.config import resolve
from celo2.runs import records


@pytest.fixture
def folder(tmp_path):
    return example_sweep(tmp_path / "sweep")


@pytest.fixture
def entries(folder):
    return {entry.label: entry for entry in comparison.read_sweep(folder).tasks["digits-mlp"]}


def scored(config, score):
    end = {"kind": "end", "finished": True, "score": score, "diverged": score is None}
    config = resolve(config)
    return Outcome(f"{config.learning_rate} {config.seed}", config, [end])


def best_of(outcomes):
    ((entry,),) = compare(outcomes).values()
    return entry


def test_best_is_the_lowest_mean_over_seeds_and_never_a_diverged_run():
    outcomes = [
        scored(small(seed=0), 1.0),
        scored(small(seed=1), 3.0),
        scored(small(learning_rate=2e-2, seed=0), 1.5),
        scored(small(learning_rate=2e-2, seed=1), 1.7),
        scored(small(learning_rate=4e-2, seed=0), 0.1),
        scored(small(learning_rate=4e-2, seed=1), None),
    ]
    found = best_of(outcomes)
    assert found.best.config.learning_rate == 2e-2 and found.best.score == pytest.approx(1.6)
    assert (found.best.runs, found.diverged) == (6, 1)
    assert best_of(outcomes[-1:]).best.score is None


def test_best_is_the_highest_where_higher_is_better():
    runs = [RunConfig("minatar-freeway", "adamw", learning_rate=r) for r in (1e-3, 2e-3)]
    assert best_of([scored(runs[0], 5.0), scored(runs[1], 40.0)]).best.score == 40.0


def test_spread_is_mean_and_range_of_what_is_there():
    runs = [scored(small(), score) for score in (1.0, None, 3.0, 5.0)]
    assert comparison.score_range(runs) == (3.0, 1.0, 5.0, 3)
    assert comparison.score_range(runs[1:2]) is None


def test_steps_to_reach_are_interpolated_at_the_first_crossing():
    points = [(0, 4.0), (10, 2.0), (20, 3.0), (30, 1.0)]
    assert comparison.steps_to_reach(points, 2.5, higher=False) == 7.5
    assert comparison.steps_to_reach(points, 2.0, higher=False) == 10
    assert comparison.steps_to_reach(points, 0.5, higher=False) is None
    assert comparison.steps_to_reach([(0, 0.1), (10, 0.9)], 0.3, higher=True) == pytest.approx(2.5)
    assert comparison.steps_to_reach([(0, 0.1)], 0.0, higher=True) == 0


def test_speed_up_is_of_the_mean_over_seeds(entries):
    # From 2.0 at step 50 to the mean 0.5 at step 100: 1.0 is two thirds of the way.
    found = comparison.reach(entries["muon"], entries["adamw"])
    assert found is not None
    assert found.steps == pytest.approx(50 + 50 * 2 / 3)
    assert found.speed_up == pytest.approx(100 / found.steps)
    own = comparison.reach(entries["adamw"], entries["adamw"])
    assert own == (100, 1.0)
    assert comparison.reach(entries["<i>$\\bad"], entries["adamw"]) is None
    assert comparison.reach(entries["lion"], entries["adamw"]) is None


def test_edge_of_the_range_is_found(entries):
    edges = {label: comparison.edge_of(entry) for label, entry in entries.items()}
    assert edges == {"adamw": None, "muon": "lowest", "lion": None, "<i>$\\bad": None}


def test_sensitivity_has_every_rate_and_none_where_it_diverged(entries):
    assert comparison.sensitivity(entries["adamw"]) == [(1e-3, 1.5), (1e-2, 1.0), (1e-1, 2.5)]
    assert comparison.sensitivity(entries["lion"]) == [(1e-2, None)]


def test_final_seeds_stand_for_the_best_setting(entries):
    assert [run.score for run in entries["muon"].seeds] == [0.4, 0.6]
    assert [run.score for run in entries["adamw"].seeds] == [1.0]  # there are no final ones
    assert entries["lion"].seeds == ()


def test_curve_takes_the_last_row_of_a_step_and_passes_over_null():
    rows = [
        {"kind": "valid", "step": s, "metrics": {"loss": x}}
        for s, x in ((5, 2.0), (0, 3.0), (5, 1.0), (9, None))
    ]
    assert comparison.curve(rows, "valid", "metrics", "loss") == [(0, 3.0), (5, 1.0)]
    assert comparison.mean_curve([[(0, 1.0), (5, 2.0)], [(5, 4.0), (9, 1.0)]]) == [(5, 3.0)]
    assert comparison.mean_curve([]) == []


def test_notes_tell_what_is_unfair(entries):
    text = "\n".join(caveats(list(entries.values())))
    assert "Unequal tuning budgets, which favour the larger: adamw 3, muon 2, lion 1" in text
    assert "muon: its best rate, 0.01, is the lowest tried" in text
    assert "adamw: a single seed" in text and "muon: a single seed" not in text
    assert "lion: no setting has a score" in text
    assert "lion: one learning rate only" in text
    assert caveats([entries["adamw"]])[0] == "Equal tuning budgets: 3 for each optimizer, in runs."


def test_notes_tell_of_runs_that_failed_or_have_not_ended(tmp_path):
    done, failed, waiting = (config_of("adamw", rate) for rate in (1e-3, 1e-2, 1e-1))
    whole = rows_of(done, [3.0, 1.0])
    broken = [*rows_of(failed, [3.0, 1.0])[:2], {"kind": "failed", "error": "OSError: no disk"}]
    write_sweep(tmp_path, [(done, whole), (failed, broken), (waiting, [])])
    sweep = comparison.read_sweep(tmp_path)
    text = "\n".join(caveats(sweep.tasks["digits-mlp"]))
    assert "adamw: 1 of 3 runs have not ended" in text
    assert "adamw: 1 of 3 runs failed, as with OSError: no disk" in text


def test_tables_have_the_numbers_of_the_records(folder):
    entries = comparison.read_sweep(folder).tasks["digits-mlp"]
    rows = {row[0]: row for row in comparison.score_table(entries)}
    assert rows["adamw"][1:] == ["0.01", "0", "1.000", "–", "1", "3", "0", "100", "1.00×"]
    assert rows["muon"][1:] == [
        "0.01",
        "0",
        "0.5000",
        "0.4000 … 0.6000",
        "2",
        "2",
        "0",
        "83",
        "1.20×",
    ]
    assert rows["lion"][1:] == ["–", "–", "–", "–", "0", "1", "1", "–", "–"]
    assert rows["<i>$\\bad"][-2:] == ["not reached", "not reached"]
    costs = {row[0]: row for row in comparison.cost_table(entries)}
    assert costs["muon"][1:] == ["20", "1.00×", "3.0", "1.5 MB", "–"]
    assert costs["lion"][1:] == ["–"] * 5


@pytest.mark.parametrize(
    "change", [{"time": 5 * 24 * 3600.0}, {"hardware": {"device": "slide rule"}}]
)
def test_times_of_different_days_or_machines_are_not_comparable(tmp_path, change):
    first, second = ((config_of(name, 1e-2), [3.0, 1.0]) for name in ("adamw", "muon"))
    alike, unlike = tmp_path / "alike", tmp_path / "unlike"
    write_sweep(alike, [(c, rows_of(c, x)) for c, x in (first, second)])
    start, *rest = rows_of(*second)
    write_sweep(unlike, [(first[0], rows_of(*first)), (second[0], [start | change, *rest])])
    found = [
        comparison.cost_caveats(comparison.read_sweep(folder).tasks["digits-mlp"])
        for folder in (alike, unlike)
    ]
    assert found[0] == [] and "cannot be compared" in found[1][0]


def on_data(config, losses, checksum):
    start, *rest = rows_of(config, losses)
    return config, [start | {"data": checksum}, *rest]


def test_runs_on_different_data_are_told(tmp_path):
    adamw, mine = config_of("adamw", 1e-2), config_of("muon", 1e-2, label="mine")
    runs = [on_data(adamw, [3.0, 1.0], "a" * 64), on_data(mine, [3.0, 0.5], "b" * 64)]
    write_sweep(tmp_path / "unlike", runs)
    (note,) = data_caveats(read_sweep(tmp_path / "unlike"))
    assert note.startswith("digits-mlp: data differ (SHA-256 adamw aaaaaaaa, mine bbbbbbbb)")
    write_sweep(tmp_path / "alike", [runs[0], on_data(mine, [3.0, 0.5], "a" * 64)])
    assert data_caveats(read_sweep(tmp_path / "alike")) == []


def test_unlike_steps_are_noted(tmp_path):
    adamw, muon = config_of("adamw", 1e-2), config_of("muon", 1e-2)
    muon = dataclasses.replace(muon, steps=500)
    write_sweep(tmp_path, [(c, rows_of(c, [3.0, 1.0])) for c in (adamw, muon)])
    assert "Not the same problem: steps differ (adamw 100, muon 500)." in caveats(
        read_sweep(tmp_path).tasks["digits-mlp"]
    )


def test_optimizer_that_lost_a_seed_cannot_win(tmp_path):
    adamw, muon = config_of("adamw", 1e-2), config_of("muon", 1e-2)
    tuning = [(adamw, rows_of(adamw, [3.0, 1.0])), (muon, rows_of(muon, [3.0, 0.5]))]
    again = config_of("muon", 1e-2, seed=1)
    final = [tuning[1], (again, rows_of(again, [3.0, None], diverged=True))]
    write_sweep(tmp_path, tuning, final)
    theirs, ours = read_sweep(tmp_path).tasks["digits-mlp"]
    assert (ours.lost, ours.diverged, without_lost(ours)) == (1, 1, " (1 of 2 diverged)")
    assert reach(ours, theirs) is None
    row = comparison.score_table([theirs, ours])[2]
    assert row[3] == "0.5000 (1 of 2 diverged)" and row[7] == "1"


def test_packed_sweep_that_is_cut_off_is_refused(tmp_path, capsys):
    runs = [(c, rows_of(c, [3.0, 1.0])) for c in (config_of("adamw", 1e-2), config_of("sgd", 1.0))]
    write_sweep(tmp_path / "sweep", runs)
    packed = tmp_path / "packed.jsonl"
    assert cli.main(["report", str(tmp_path / "sweep"), "--pack", str(packed)]) == 0
    lines = packed.read_text().splitlines()
    packed.write_text("\n".join(line for line in lines if '"run":"sgd' not in line))
    assert records.read(packed)
    capsys.readouterr()
    assert cli.main(["report", str(packed)]) != 0
    assert "is cut off: it lists sgd-1-0" in capsys.readouterr().err


def test_unpacked_sweep_lists_what_the_file_does(tmp_path):
    runs = [(c, rows_of(c, [3.0, 1.0])) for c in (config_of("adamw", 1e-2), config_of("sgd", 1.0))]
    write_sweep(tmp_path / "sweep", runs)
    packed = tmp_path / "packed.jsonl"
    assert pack(read_sweep(tmp_path / "sweep"), packed) == unpack(packed, tmp_path / "other") == 2
    found = read_sweep(tmp_path / "other")
    assert {run.config.label for run in found.runs} == {"adamw", "sgd"}
    (tmp_path / "other" / "sweep.json").write_text("mine")
    assert unpack(packed, tmp_path / "other") == 0
    assert (tmp_path / "other" / "sweep.json").read_text() == "mine"


def test_file_that_is_no_packed_sweep_is_refused(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"kind": "start"}\n')
    assert cli.main(["report", str(tmp_path / "rows.jsonl")]) != 0
    assert "is not a packed sweep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no sweep.json: give the --out of `celo2 sweep`"),
        ('{"tuning": {}, "final": {}}', "has ended: let `celo2 sweep` continue first"),
        ("{", "lists no runs"),
        ("[]", "lists no runs"),
    ],
)
def test_folder_without_results_is_refused(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "sweep.json").write_text(content)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_bootstrap_interval_is_that_of_the_mean():
    scores = np.random.default_rng(1).normal(3.0, 2.0, 400)
    found = bootstrap([scores])
    assert found.value == pytest.approx(scores.mean())
    for end in (found.value - found.low, found.high - found.value):
        assert end == pytest.approx(1.96 * scores.std() / 20, rel=0.05)
    assert bootstrap([[2.0, 2.0, 2.0]]) == (2.0, 2.0, 2.0)


def test_bootstrap_draws_within_each_task():
    found = bootstrap([[1.0, 1.0, 1.0], [100.0, 100.0, 100.0]])
    assert found == (50.5, 50.5, 50.5)  # tasks far apart do not widen it


def test_interquartile_mean_leaves_outliers_out():
    scores = [0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 1e9, 1e9]
    assert bootstrap([scores], interquartile_mean).value == 2.5
