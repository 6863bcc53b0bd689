"""Tries beside a run; the command that tries is a script that prints what it is given."""

import json
import os
import sys
import time

import numpy as np
import pytest
from tiny_runs import TINY, newest, of_kind, run, shared_programs, stop_after, tiny

import celo2
from celo2.metatrain import heldout, metatrain, status
from celo2.metatrain.heldout import Tries, begin_try, end_try, resume_try, stop_tries
from celo2.rule import Rule, initial_weights
from celo2.runs import records
from celo2.runs.folder import RunFolder, locked

pytestmark = pytest.mark.usefixtures("shared_programs")
__all__ = ["shared_programs"]

# Prints the next line of `scores`, and notes what it was given and how low its priority is.
SCRIPT = """
import json, os, sys
import celo2
folder = os.path.dirname(sys.argv[0])
iteration = celo2.load(sys.argv[1]).origin["iterations"]
with open(os.path.join(folder, "calls"), "a+") as calls:
    calls.write(f"{iteration} {os.nice(0)}\\n")
    calls.seek(0)
    count = len(calls.readlines())
print(open(os.path.join(folder, "scores")).read().splitlines()[count - 1])
"""
SLEEP = [sys.executable, "-c", "import time; time.sleep(100)"]


@pytest.fixture
def script(tmp_path):
    """The command, and a function that says what its calls print."""
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "try.py").write_text(SCRIPT)

    def command(*results):
        lines = (r if isinstance(r, str) else json.dumps(r) for r in results)
        (folder / "scores").write_text("\n".join(lines))
        return [sys.executable, str(folder / "try.py")]

    command.calls = lambda: (folder / "calls").read_text().splitlines()
    return command


def rule_of(iteration: int) -> Rule:
    weights = initial_weights(TINY.rule, np.random.default_rng(iteration))
    return Rule(TINY.rule, weights, {"iterations": iteration})


def wait(tries: Tries):
    deadline = time.monotonic() + 60
    while tries.process is not None and tries.process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return end_try(tries)


def test_try_is_due_at_multiples_and_at_the_end_of_a_longer_run(tmp_path):
    tries = Tries(tmp_path, (), every=5)
    assert [done for done in (0, 3, 5, 7) if tries.is_due(done, 12)] == [5, 7]
    tries.begun = 7  # the one before took longer than five iterations
    assert [done for done in (8, 9, 10, 12) if tries.is_due(done, 12)] == [10, 12]
    tries.begun = 11
    assert tries.is_due(12, 12) and not tries.is_due(12, 13)
    assert not Tries(tmp_path, (), every=5).is_due(4, 4)


def test_result_is_what_the_command_prints_at_a_lower_priority(tmp_path, script):
    tries = Tries(tmp_path / "heldout", script({"score": 0.5}), 5)
    begin_try(tries, rule_of(7))
    assert tries.begun == 7
    assert wait(tries) == {"score": 0.5} and end_try(tries) is None
    (call,) = script.calls()
    assert call == f"7 {min(os.nice(0) + heldout.NICE, 19)}"


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("print('[]')", "exit status 0"),
        ("import sys; sys.exit('no such rule')", "no such rule"),
        ("print('{}'); raise SystemExit(2)", "exit status 2"),
        ("pass", "exit status 0, and no JSON"),
    ],
)
def test_failed_try_says_why(tmp_path, command, cause):
    tries = Tries(tmp_path / "heldout", [sys.executable, "-c", command], 5)
    begin_try(tries, rule_of(5))
    with pytest.raises(ValueError, match=f"the held-out try of iteration 5 failed: {cause}"):
        wait(tries)


def test_try_that_was_broken_off_is_made_on_resume(tmp_path, script):
    tries = Tries(tmp_path / "heldout", SLEEP, 5)
    begin_try(tries, rule_of(10))
    assert tries.is_running()
    stop_tries(tries)
    again = Tries(tmp_path / "heldout", script({"score": 1.0}), 5)
    resume_try(again, 10, 12)  # it has a row already
    assert again.process is None
    resume_try(again, 5, 9)  # its iteration comes again
    assert again.process is None and again.begun == 5
    with locked(RunFolder(tmp_path / "heldout")):  # a killed run's try still goes on
        resume_try(again, 5, 12)
    assert again.process is None
    resume_try(again, 5, 12)
    assert again.begun == 10 and wait(again) == {"score": 1.0}


def test_best_rule_is_kept_and_survives_resuming(tmp_path, script):
    command = script({"score": 0.5}, {"score": 0.1, "optimizers": {}}, '{"score": NaN}')
    out, config = tmp_path / "run", tiny(iterations=20)
    options = {"try_command": command, "try_every": 10}
    rows = run(out, config, **options, stop=stop_after(1))
    assert rows[-1]["reason"] == "stopped"  # whether or not the first try has ended
    rows = run(out, config, **options, resume=True)
    assert rows[-1]["reason"] == "finished"
    stored = of_kind(records.read(out / "records.jsonl"), "heldout")
    assert [row["iteration"] for row in stored] == [10, 20]
    assert [call.split()[0] for call in script.calls()][-1] == "20"
    best = min(stored, key=lambda row: row["score"] or 9)
    kept = celo2.load(out / "best.safetensors").origin
    assert kept["iterations"] == best["iteration"]
    assert kept["heldout"] == {"iteration": best["iteration"], "score": best["score"]}
    assert status(out)["best"]["score"] == best["score"]
    run(out, tiny(iterations=30), **options, resume=True)
    rows = of_kind(records.read(out / "records.jsonl"), "heldout")
    assert rows[:2] == stored and celo2.load(out / "best.safetensors").origin == kept


def test_no_second_try_while_one_runs_and_a_run_that_is_left_ends_it(tmp_path):
    started = []

    def begin(tries, rule):
        started.append(rule.origin["iterations"])
        begin_try(tries, rule)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("celo2.metatrain.loop.begin_try", begin)
        rows = metatrain(TINY, tmp_path / "run", try_command=SLEEP, try_every=2)
        next(row for row in rows if row.get("iteration") == 10)
        (folder,) = (tmp_path / "run").glob("heldout")
        rows.close()
    assert started == [2] and newest(tmp_path / "run").iteration == 10
    assert (folder / "rule.safetensors").is_file()


def test_failed_try_is_a_warning_and_the_run_goes_on(tmp_path, script):
    rows = run(tmp_path / "run", try_command=script("{", "{"), try_every=10)
    assert rows[-1]["reason"] == "finished" and of_kind(rows, "heldout") == []
    assert "held-out try of iteration 12 failed" in of_kind(rows, "warning")[-1]["cause"]
    assert not (tmp_path / "run" / "best.safetensors").exists()


def test_try_broken_off_at_the_end_of_a_run_is_made_on_resume(tmp_path, script):
    out, config = tmp_path / "run", tiny(iterations=10)
    rows = run(out, config, try_command=SLEEP, try_every=5, stop=stop_after(2))
    assert rows[-1]["iteration"] == 10 and of_kind(rows, "heldout") == []
    results = script({"score": 0.5}, {"score": 0.4})
    rows = run(out, config, try_command=results, try_every=5, resume=True)
    assert [(row["iteration"], row["score"]) for row in of_kind(rows, "heldout")] == [
        (5, 0.5),
        (10, 0.4),
    ]
