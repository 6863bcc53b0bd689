import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tiny_runs import FLAGS, TINY, digest, newest, of_kind, run, shared_programs, tiny

from celo2 import cli
from celo2.commands import meta_train, trackers
from celo2.commands.meta_train import largest_divisor, parse
from celo2.metatrain import PRESETS
from celo2.runs import records
from celo2.runs.fields import to_fields
from celo2.runs.folder import RunFolder
from celo2.tasks import download

pytestmark = pytest.mark.usefixtures("shared_programs")
__all__ = ["shared_programs"]
COMMAND = [sys.executable, "-m", "celo2.cli", "meta-train", *FLAGS, "--devices", "1"]


def start(out, *options):
    return subprocess.Popen([*COMMAND, "--out", out, *options], stderr=subprocess.PIPE, text=True)


def wait_for(condition, process, seconds=110):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rows_of(out):
    return of_kind(records.read(out / "records.jsonl"), "train")


def test_every_field_can_be_set_from_the_command_line():
    options = parse(["--out", "x", *FLAGS, "--iterations", "12"])
    assert options.meta == TINY
    assert parse(["--out", "x", "--preset", "celo2-base"]).meta == PRESETS["celo2-base"]


def test_command_line_wins_over_toml_and_toml_over_preset(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("seed = 3\nproblems = 5\n[rule]\nhidden = [2]\n")
    options = parse(f"--out x --preset=celo2-base --config {path} --problems 6".split())
    assert (options.meta.seed, options.meta.problems) == (3, 6)
    assert options.meta.rule.hidden == (2,) and options.meta.rule.vectors == "rule"


def test_resumed_run_starts_from_its_own_config(tmp_path):
    RunFolder(tmp_path).write_config({"config": to_fields(TINY)})
    assert parse(["--out", str(tmp_path), "--resume"]).meta == TINY
    longer = parse(["--out", str(tmp_path), "--resume", "--iterations", "99"])
    assert longer.meta == tiny(iterations=99)
    asked = parse(["--out", str(tmp_path), "--resume", "--preset", "celo2"])
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


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_signal_saves_first(tmp_path, number, code):
    process = start(tmp_path / "run", "--iterations", "1000000")
    with process:
        wait_for(lambda: rows_of(tmp_path / "run"), process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "saving first" in err and "stopped" in err and "Traceback" not in err
    assert newest(tmp_path / "run").iteration == rows_of(tmp_path / "run")[-1]["iteration"]


def test_second_signal_ends_even_compiled_code_at_once():
    code = (
        "import time\n"
        "from celo2.commands.signals import stop_on_signal\n"
        "with stop_on_signal(lambda text: print(text, flush=True)) as asked:\n"
        "    asked.leave = lambda: print('leaving', flush=True)\n"
        "    print('ready', flush=True)\n"
        "    import threading; threading.Lock().acquire() or None\n"
        "    lock = threading.Lock(); lock.acquire(); lock.acquire()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert "saving first" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130 and process.stdout.readline() == "leaving\n"


def status_of(out) -> dict:
    run = subprocess.run(
        [sys.executable, "-m", "celo2.cli", "status", out, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)


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
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_trackers_get_the_numbers_of_a_row():
    row = {"kind": "train", "iteration": 3, "loss": 1.5, "family_loss": {"mnist": 2.0}, "x": None}
    assert trackers.scalars(row) == {"train/loss": 1.5, "train/family_loss/mnist": 2.0}
    assert trackers.scalars({"kind": "end", "iteration": 3}) == {}
    row = {"kind": "valid", "step": 3, "metrics": {"loss": 1.5}}
    assert trackers.scalars(row) == {"valid/metrics/loss": 1.5}


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda out: trackers.tensorboard(out), "tensorboardX"),
        (lambda out: trackers.wandb(out, {}), "wandb"),
    ],
)
def test_missing_tracker_is_named(make, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"needs {package}: pip install"):
        make(tmp_path)


def test_rows_reach_wandb(tmp_path, monkeypatch):
    sent = []

    class Run:
        def log(self, values, step):
            sent.append((step, values))

        def finish(self):
            sent.append("finished")

    class Client:
        init = staticmethod(lambda **options: Run())

    monkeypatch.setitem(sys.modules, "wandb", Client)
    send = trackers.wandb(tmp_path, {})
    send({"kind": "train", "iteration": 3, "loss": 1.5})
    send({"kind": "end", "iteration": 3})
    assert sent == [(3, {"train/loss": 1.5}), "finished"]


def test_tensorboard_writes_to_the_run_folder(tmp_path):
    pytest.importorskip("tensorboardX")
    send = trackers.tensorboard(tmp_path)
    send({"kind": "train", "iteration": 3, "loss": 1.5})
    send({"kind": "end", "iteration": 3})
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in file.read_bytes()


def test_data_fetch_shows_progress_and_checksums(tmp_path, monkeypatch, capsys):
    def fake(folder, names, *, full, force, report):
        assert (folder, names, full, force) == (str(tmp_path), ("mnist",), False, True)
        report(download.FetchProgress("mnist", "converting", 1000, 70000))
        report(download.FetchProgress("mnist", "written", 70000, 70000))
        return {"mnist_8x8.npz": "ab" * 32}

    monkeypatch.setattr("celo2.commands.data.fetch", fake)
    options = ["--names", "mnist", "--data", str(tmp_path), "--force"]
    assert cli.main(["data", "fetch", *options]) == 0
    captured = capsys.readouterr()
    assert "mnist          written" in captured.err
    assert "mnist_8x8.npz" in captured.out and "ab" * 32 in captured.out


def test_data_fetch_offline_is_one_line(monkeypatch, capsys):
    def fake(*_, **__):
        raise download.FetchError("the hub does not answer:\nis this machine online?")

    monkeypatch.setattr("celo2.commands.data.fetch", fake)
    assert cli.main(["data", "fetch"]) == 2
    assert capsys.readouterr().err == "celo2: the hub does not answer: is this machine online?\n"


def test_refused_run_is_one_line_and_status_2(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(meta_train, "start_devices", lambda launch, default: None)
    RunFolder(tmp_path).write_config({"config": to_fields(TINY)})
    assert cli.main(["meta-train", *FLAGS, "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "holds a run: continue it with --resume" in err
