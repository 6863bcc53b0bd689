import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from counting_runs import array_files, flip_bit
from tiny_runs import FLAGS, TINY, digest, newest, of_kind, run, shared_programs, tiny

from celo2 import cli
from celo2.commands import meta_train
from celo2.commands.meta_train import parse_options
from celo2.metatrain import PRESETS
from celo2.runs import records
from celo2.runs.checkpoint import read_one
from celo2.runs.fields import to_fields
from celo2.runs.folder import RunFolder
from celo2.runs.processes import largest_divisor
from processes import run_processes

pytestmark = pytest.mark.usefixtures("shared_programs")
__all__ = ["shared_programs"]
COMMAND = [sys.executable, "-m", "celo2.cli", "meta-train", *FLAGS, "--devices", "1"]


def start(out, *options):
    return subprocess.Popen([*COMMAND, "--out", out, *options], stderr=subprocess.PIPE, text=True)


def wait_for(condition, process, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rows_of(out):
    return of_kind(records.read(out / "records.jsonl"), "train")


def test_every_field_can_be_set_from_the_command_line():
    options = parse_options(["--out", "x", *FLAGS, "--iterations", "12"])
    assert options.meta == TINY
    assert parse_options(["--out", "x", "--preset", "celo2-base"]).meta == PRESETS["celo2-base"]


def test_command_line_wins_over_toml_and_toml_over_preset(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("seed = 3\nproblems = 5\n[rule]\nhidden = [2]\n")
    options = parse_options(f"--out x --preset=celo2-base --config {path} --problems 6".split())
    assert (options.meta.seed, options.meta.problems) == (3, 6)
    assert options.meta.rule.hidden == (2,) and options.meta.rule.vectors == "rule"


def test_families_of_the_config_file_are_not_lost(tmp_path):
    path = tmp_path / "families.toml"
    path.write_text('[[families]]\nname = "vit"\nproblems = 2\n')
    wanted = rf"--families mlp would replace the \[\[families\]\] of {path}"
    with pytest.raises(ValueError, match=wanted):
        parse_options(f"--out x --config {path} --families mlp".split())


def test_resumed_run_starts_from_its_own_config(tmp_path):
    RunFolder(tmp_path).write_config({"config": to_fields(TINY)})
    assert parse_options(["--out", str(tmp_path), "--resume"]).meta == TINY
    longer = parse_options(["--out", str(tmp_path), "--resume", "--iterations", "99"])
    assert longer.meta == tiny(iterations=99)
    asked = parse_options(["--out", str(tmp_path), "--resume", "--preset", "celo2"])
    assert asked.meta == PRESETS["celo2"]


@pytest.mark.parametrize(
    ("number", "limit", "best"), [(32, 12, 8), (8, 2, 2), (7, 4, 1), (4, 9, 4)]
)
def test_devices_divide_the_problems(number, limit, best):
    assert largest_divisor(number, limit) == best


def test_killed_run_resumes_as_if_nothing_had_happened(tmp_path):
    out = tmp_path / "run"
    process = start(out, "--iterations", "1000000", "--checkpoint-every", "7")
    with process:
        wait_for(lambda: len(rows_of(out)) > 20, process)
        assert status_of(out)["state"] == "running"
        process.kill()
        process.wait()
    kept = newest(out)
    assert kept.iteration >= rows_of(out)[-1]["iteration"] - 2 * 7
    total = kept.iteration + 5
    rows = run(out, tiny(iterations=total), resume=True)
    assert rows[0]["iteration"] == kept.iteration
    run(tmp_path / "whole", tiny(iterations=total))
    assert digest(out) == digest(tmp_path / "whole")
    iterations = [row["iteration"] for row in rows_of(out)]
    assert iterations == sorted(set(iterations)) and iterations[-1] == total


# What stops a run is the same as in `celo2 run`, whose test is not slow.
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_first(tmp_path, number, code):
    process = start(tmp_path / "run", "--iterations", "1000000")
    with process:
        wait_for(lambda: rows_of(tmp_path / "run"), process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "saving first" in err and "stopped" in err and "Traceback" not in err
    assert newest(tmp_path / "run").iteration == rows_of(tmp_path / "run")[-1]["iteration"]


def status_of(out) -> dict:
    run = subprocess.run(
        [sys.executable, "-m", "celo2.cli", "status", out, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)


def test_refused_run_is_one_line_and_status_2(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(meta_train, "start_devices", lambda launch, default: None)
    RunFolder(tmp_path).write_config({"config": to_fields(TINY)})
    assert cli.main(["meta-train", *FLAGS, "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "holds a run: continue it with --resume" in err


START = {"kind": "start", "iteration": 0, "data": ["digits"], "devices": 1, "platform": "cpu"}


HELD_OUT = {"kind": "heldout", "iteration": 1, "score": -0.1, "error": 0.02}


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the command on rows that are given."""
    monkeypatch.setattr(meta_train, "start_devices", lambda launch, default: None)

    def call(*rows: dict) -> int:
        monkeypatch.setattr(meta_train, "metatrain", lambda *_, **__: iter(rows))
        return meta_train.meta_train(["--out", str(tmp_path / "run"), *FLAGS])

    return call


@pytest.mark.parametrize(("reason", "code"), [("stopped", 143), ("time is up", 0)])
def test_process_that_another_one_s_signal_stopped_says_so(command, reason, code):
    assert command(START, {"kind": "end", "iteration": 1, "reason": reason}) == code


@pytest.mark.parametrize(("data", "times"), [("digits", 1), ("mnist", 0)])
def test_problems_on_the_images_of_training_are_named_once(command, capsys, data, times):
    row = HELD_OUT | {"problems": {"digits-mlp": {}, "digits-conv": {}, "text-tiny": {}}}
    end = {"kind": "end", "iteration": 1, "reason": "finished"}
    assert command(START | {"data": [data]}, row, row, end) == 0
    err = capsys.readouterr().err
    assert err.count("held-out score -0.1000 ± 0.0200") == 2
    assert err.count("learns on the same images as digits-mlp, digits-conv:") == times


def test_status_shows_a_run_without_touching_it(tmp_path, capsys):
    out = tmp_path / "run"
    run(out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    os.chmod(out, 0o500)
    assert cli.main(["status", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    os.chmod(out, 0o700)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert (facts["iteration"], facts["iterations"], facts["state"]) == (12, 12, "finished")
    assert facts["process"] is None and facts["loss"] == rows_of(out)[-1]["loss"]
    assert facts["digest"] == newest(out).meta["digest"] and len(facts["digest"]) == 64
    assert cli.main(["status", str(out)]) == 0
    table = capsys.readouterr().out
    assert "12 of 12" in table and facts["digest"] in table


def test_status_of_no_run_says_so(tmp_path, capsys):
    (tmp_path / "file").touch()
    for wrong in (tmp_path, tmp_path / "file", tmp_path / "nowhere"):
        assert cli.main(["status", str(wrong)]) == 2
        assert f"{wrong.name} holds no run" in capsys.readouterr().err


def test_tries_are_made_where_they_are_asked_for():
    def command(*options):
        return meta_train.try_command(parse_options(["--out", "x", *options]))

    assert command("--try-every", "0") is None
    assert command("--try-every", "5")[-2:] == ["--out", "x/heldout"]
    with pytest.raises(ValueError, match="try_every=-1 must not be negative; 0 never tries"):
        command("--try-every", "-1")


def test_status_of_a_folder_of_run_says_so(tmp_path, capsys):
    RunFolder(tmp_path).write_config({"config": {"task": "digits-mlp", "steps": 10}, "data": {}})
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "is a folder of `celo2 run`, not of `celo2 meta-train`" in capsys.readouterr().err


def run_meta(out, count, *options) -> None:
    run_processes(count, ["meta-train", *FLAGS, "--out", str(out), *options])


def test_two_processes_find_the_gradient_of_one_device(tmp_path):
    run_meta(tmp_path / "two", 2, "--iterations", "2", "--checkpoint-every", "1")
    run(tmp_path / "one", tiny(iterations=2), checkpoint_every=1)
    two, one = (read_one(tmp_path / name / "checkpoints", 1) for name in ("two", "one"))
    for name in ("w0", "b0", "w1", "b1"):
        moment = f"outer.0.mu.{name}"  # a tenth of the first gradient
        scale = np.abs(one.arrays[moment]).max()
        assert scale > 0
        np.testing.assert_allclose(
            two.arrays[moment], one.arrays[moment], rtol=1e-2, atol=1e-2 * scale
        )
    rows = [of_kind(records.read(tmp_path / n / "records.jsonl"), "train") for n in ("two", "one")]
    for ours, theirs in zip(*rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["inner_steps"] == theirs["inner_steps"]


@pytest.mark.slow
def test_run_of_two_processes_resumes_exactly_and_in_another_number_of_processes(tmp_path):
    run_meta(tmp_path / "whole", 2, "--iterations", "8")
    run_meta(tmp_path / "cut", 2, "--iterations", "4")
    run_meta(tmp_path / "cut", 2, "--iterations", "8", "--resume")
    whole, cut = (read_one(tmp_path / name / "checkpoints", 8) for name in ("whole", "cut"))
    assert whole.meta["digest"] == cut.meta["digest"]
    rows = run(tmp_path / "cut", tiny(iterations=10), resume=True)
    assert rows[0]["iteration"] == 8 and rows[-1]["iteration"] == 10


@pytest.mark.slow
def test_damage_in_one_process_s_part_sends_all_to_the_checkpoint_before(tmp_path):
    options = ["--checkpoint-every", "2", "--resume", "--iterations"]
    for name in ("whole", "harmed"):
        run_meta(tmp_path / name, 2, *options, "4")
    harmed = tmp_path / "harmed"
    (file, *_) = (f for f in reversed(array_files(harmed, 4)) if "process_1" in str(f))
    flip_bit(file, file.stat().st_size // 2)
    for name in ("whole", "harmed"):
        run_meta(tmp_path / name, 2, *options, "6")
    warnings = of_kind(records.read(harmed / "records.jsonl"), "warning")
    assert "checkpoint of iteration 4 is damaged" in warnings[0]["cause"]
    digests = [
        read_one(tmp_path / n / "checkpoints", 6).meta["digest"] for n in ("whole", "harmed")
    ]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_refusal_ends_all_processes(tmp_path):
    run(tmp_path, tiny(iterations=1))
    with pytest.raises(AssertionError, match="holds a run|Process 0 could not start"):
        run_meta(tmp_path, 2, "--iterations", "1")
