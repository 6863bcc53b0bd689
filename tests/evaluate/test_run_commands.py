import os
import signal
import subprocess
import sys
import time

import pytest
from small_runs import of_kind

from celo2 import cli
from celo2.runs import checkpoint, records

pytest.importorskip("tyro")
OPTIONS = "--optimizer adamw --batch 16 --evaluation-batches 2".split()
COMMAND = [sys.executable, "-m", "celo2.cli"]


def test_run_is_recorded_and_told_in_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "digits-mlp", *OPTIONS, "--steps", "4"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("digits-mlp_adamw_lr0.001_")
    assert f"records in runs/{folder.name}" in capsys.readouterr().err
    assert records.read(folder / "records.jsonl")[-1]["kind"] == "end"


def test_diverged_run_has_status_3(tmp_path, capsys):
    options = "--optimizer sgd --learning-rate 1e30 --batch 16 --steps 20".split()
    assert cli.main(["run", "digits-mlp", *options, "--out", str(tmp_path / "run")]) == 3
    assert "diverged at step" in capsys.readouterr().err


def test_dry_run_needs_no_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CELO2_DATA", str(tmp_path / "nowhere"))
    assert cli.main(["run", "lm30m", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "49,250,304 in 38 tensors" in text and "600,047,616" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "digit"], "'digit' is not a task"),
        (["run", "digits-mlp", "--optimizer", "adamv"], "'adamv' is none of"),
        (["run", "digits-mlp", "--warmup", "2"], "warmup=2.0 must be in"),
        (["sweep", "no-such.toml"], "no-such.toml"),
        (["sweep", __file__], "test_run_commands.py"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("celo2: ") and message in err[-1]


def test_signal_saves_first_and_the_run_goes_on_from_there(tmp_path):
    out = tmp_path / "run"
    command = [*COMMAND, "run", "digits-mlp", *OPTIONS, "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--steps", "1000000", "--evaluate-every", "1000000"],
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        deadline = time.monotonic() + 100
        while not of_kind(records.read(out / "records.jsonl"), "train"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "saving first" in err and "Traceback" not in err
    last = of_kind(records.read(out / "records.jsonl"), "train")[-1]["step"]
    assert checkpoint.list_iterations(out / "checkpoints") == [last]


@pytest.mark.slow
def test_several_processes_share_a_sweep(tmp_path):
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        "final_seeds = [1]\n[run]\nsteps = 6\nbatch = 8\nevaluation_batches = 2\n"
        "[tasks.digits-mlp]\n[optimizers.adamw]\nlearning_rates = [1e-3, 1e-2]\n"
        "[optimizers.lion]\nlearning_rates = [1e-3, 1e-2]\n"
    )
    done = subprocess.run(
        [*COMMAND, "sweep", str(recipe), "--out", str(tmp_path / "out"), "--jobs", "2"],
        capture_output=True,
        text=True,
        timeout=110,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 and "of 1" in done.stdout
    for folder in (tmp_path / "out").glob("digits*"):
        rows = records.read(folder / "records.jsonl")
        assert len(of_kind(rows, "start")) == len(of_kind(rows, "end")) == 1
    assert len(list((tmp_path / "out").glob("digits*"))) == 6
