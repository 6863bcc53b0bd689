import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import RECIPE, of_kind
from tiny_runs import shared_build

from celo2 import cli
from celo2.evaluate.config import find_task
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


OWN_TASK = """
import jax.numpy as jnp
import jax
from celo2.tasks import Task, TaskSpec

def line(batch=8):
    def sample(data, key, split):
        x = jax.random.normal(key, (batch, 4))
        return x, x @ data
    def loss(params, pair):
        value = jnp.mean((pair[0] @ params["w"] - pair[1]) ** 2)
        return value, {"largest": jnp.max(jnp.abs(params["w"]))}
    return Task(lambda key: {"w": jnp.zeros((4, 3))}, sample, loss, jnp.ones((4, 3)))

def nothing():
    return 3

misnamed = TaskSpec(line, 10, 8, metric="accuracy")
"""


@pytest.fixture
def own_tasks(tmp_path, monkeypatch):
    """A module of that name in the current folder."""
    (tmp_path / "own_tasks.py").write_text(OWN_TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_tasks", None)
    find_task.cache_clear()


@pytest.mark.usefixtures("own_tasks")
def test_task_of_ones_own_is_trained_by_its_address(tmp_path):
    command = ["run", "own_tasks:line", "--optimizer", "adamw", "--learning-rate", "0.05"]
    assert cli.main([*command, "--steps", "60", "--out", "run", "--data", "."]) == 0
    rows = records.read(tmp_path / "run" / "records.jsonl")
    assert rows[0]["config"]["batch"] == 8 and rows[0]["sizes"]["parameters"] == 12
    assert rows[-1]["score"] < 0.1 * rows[1]["metrics"]["loss"]
    assert cli.main([*command, "--steps", "2", "--batch", "4", "--out", "four"]) == 0


@pytest.mark.usefixtures("own_tasks")
def test_what_makes_no_task_is_told(capsys):
    for name, message in (
        ("own_tasks:nothing", "returned a int, not a Task"),
        (
            "own_tasks:misnamed",
            "compared by 'accuracy', which is not among its metrics, largest",
        ),
        ("own_tasks:other", "own_tasks has no 'other'"),
        ("own_tasks:OWN", "own_tasks has no 'OWN'"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
    ):
        assert cli.main(["run", name, "--steps", "2", "--out", "run"]) == 2
        assert message in capsys.readouterr().err


def test_records_go_to_tensorboard_too(tmp_path):
    pytest.importorskip("tensorboardX")
    options = [*OPTIONS, "--steps", "4", "--out", str(tmp_path), "--tensorboard"]
    assert cli.main(["run", "digits-mlp", *options]) == 0
    (file,) = (tmp_path / "tensorboard").iterdir()
    content = file.read_bytes()
    assert b"train/metrics/loss" in content and b"valid/metrics/loss" in content


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
        (["sweep", __file__], "test_evaluate.py"),
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
    *table, page = done.stdout.splitlines()
    assert len(table) == 4 and table[-1].startswith("lion")
    assert page == str(tmp_path / "out" / "report.html") and Path(page).is_file()
    for folder in (tmp_path / "out").glob("digits*"):
        rows = records.read(folder / "records.jsonl")
        assert len(of_kind(rows, "start")) == len(of_kind(rows, "end")) == 1
    assert len(list((tmp_path / "out").glob("digits*"))) == 6


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


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


def test_command_shows_the_table_and_skips_what_is_done(recipe_file, tmp_path, capsys, monkeypatch):
    read = records.read
    command = ["sweep", str(recipe_file), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    captured = capsys.readouterr()
    assert "different tuning budgets" in captured.err and "diverged" in captured.err
    task, head, adamw, plain, page = captured.out.splitlines()
    assert page == str(tmp_path / "out" / "report.html") and task == "digits-mlp"
    assert re.split("  +", head)[:4] == ["optimizer", "best rate", "weight decay", "final loss"]
    # Optimizer, range of two seeds, their number, tuning runs, those that diverged.
    assert re.match(r"adamw .* … [\d.]+ +2 +3 +0 ", adamw)
    assert re.match(r"plain .* … [\d.]+ +2 +2 +1 ", plain)
    parsed = []
    monkeypatch.setattr(records, "read", lambda path: parsed.append(path) or read(path))
    assert cli.main(command) == 0
    captured = capsys.readouterr()
    assert captured.err.count("(before)") == 7 and captured.out.splitlines()[2] == adamw
    assert len(parsed) == len(set(parsed)) == 7  # each run's records once


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


def test_dry_run_shows_texts_and_sizes_and_writes_nothing(recipe_file, tmp_path, capsys):
    pytest.importorskip("tyro")
    out = tmp_path / "out"
    assert cli.main(["sweep", str(recipe_file), "--out", str(out), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "celo2 sweep this" in text and "little" in text
    assert "2,410 in 4 tensors" in text and "digits-mlp with plain" in text
    assert not out.exists()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--jobs", "0", "jobs=0 must be at least 1"),
        ("--known", "tiny.toml", "tiny.toml is not a packed sweep"),
        ("--known", "absent.jsonl", "absent.jsonl"),
    ],
)
def test_dry_run_refuses_what_the_sweep_would(
    recipe_file, option, value, message, capsys, monkeypatch
):
    monkeypatch.chdir(recipe_file.parent)
    assert cli.main(["sweep", str(recipe_file), "--dry-run", option, value]) == 2
    assert message in capsys.readouterr().err


TRAINS = """
[meta_train]
iterations = 2
datasets = ["digits"]
problems = 4
batch = 8
truncation = 5
unroll = [5, 20]
rule = { hidden = [4], momentum_decays = [0.9], factored_decays = [0.9] }
[run]
steps = 2
evaluation_batches = 1
learning_rate = 1e-3
[tasks.digits-mlp]
[optimizers.usual]
meta_train = {}
[optimizers.raw]
meta_train = {}
at_test = { norm = "raw" }
[optimizers.far]
meta_train = { learning_rate = 1e30 }
"""


def test_rules_of_a_recipe_are_made_before_its_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("celo2.metatrain.loop.build", shared_build)
    recipe, out = tmp_path / "trains.toml", tmp_path / "out"
    recipe.write_text(TRAINS)
    arguments = ["sweep", str(recipe), "--out", str(out), "--no-report"]
    assert cli.main([*arguments, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("2 iterations of meta-training") == 2
    assert "usual (celo2 for" in shown and "which is not there yet" in shown
    assert cli.main(arguments) == 1  # one diverges, and its runs with it
    told = capsys.readouterr().err
    assert "at-test_norm-raw.safetensors: is there" in told
    assert "learning_rate-1e-30/rule.safetensors: Given up" in told
    labels = {
        fields["label"]
        for fields in json.loads((out / "sweep.json").read_text())["tuning"].values()
    }
    assert labels == {"usual", "raw"}
