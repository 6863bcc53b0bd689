"""What makes scores incomparable, and that a reader is told."""

import pytest
from hand_made import config_of, rows_of, write_sweep

from celo2 import cli
from celo2.evaluate.comparison import caveats, data_caveats, reach, read_sweep, without_lost
from celo2.runs import records

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
from celo2.evaluate import report  # noqa: E402


def on_data(config, losses, checksum):
    start, *rest = rows_of(config, losses)
    return config, [start | {"data": checksum}, *rest]


def test_runs_on_different_data_are_told(tmp_path):
    adamw, mine = config_of("adamw", 1e-2), config_of("muon", 1e-2, label="mine")
    runs = [on_data(adamw, [3.0, 1.0], "a" * 64), on_data(mine, [3.0, 0.5], "b" * 64)]
    write_sweep(tmp_path / "unlike", runs)
    (note,) = data_caveats(read_sweep(tmp_path / "unlike"))
    assert note.startswith("digits-mlp: data differ (SHA-256 adamw aaaaaaaa, mine bbbbbbbb)")
    assert "data differ" in report.build_page(read_sweep(tmp_path / "unlike"))
    write_sweep(tmp_path / "alike", [runs[0], on_data(mine, [3.0, 0.5], "a" * 64)])
    assert data_caveats(read_sweep(tmp_path / "alike")) == []


def test_unlike_steps_are_noted(tmp_path):
    import dataclasses

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
    sweep = read_sweep(tmp_path)
    theirs, ours = sweep.tasks["digits-mlp"]
    assert (ours.lost, ours.diverged, without_lost(ours)) == (1, 1, " (1 of 2 diverged)")
    assert reach(sweep, ours, theirs) is None
    assert report._winner([theirs, ours], higher=False) == "adamw"
    row = report.score_table(sweep, "digits-mlp")[2]
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
