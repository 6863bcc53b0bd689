"""How a run ends: what it keeps, what it waits for, and its exit status."""

import pytest
from quadratics import RULE, WEIGHTS
from tiny_runs import FLAGS, newest, of_kind, run, shared_programs, stop_after, tiny

import celo2
from celo2 import cli
from celo2.commands import meta_train
from celo2.commands.signals import Asked
from celo2.metatrain import Limits, divergence, heldout, loop, metatrain
from celo2.rule import Rule
from celo2.runs.checkpoint import list_iterations
from celo2.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("shared_programs")
__all__ = ["shared_programs"]
GOOD = Rule(RULE, WEIGHTS)


def leave(out, at: str = "train") -> list[dict]:
    """Takes rows up to the first of that kind and leaves."""
    rows, taken = metatrain(tiny(iterations=30), out), []
    for row in rows:
        taken.append(row)
        if row["kind"] == at:
            break
    rows.close()
    return taken


@pytest.mark.parametrize(
    "end",
    [
        lambda out: run(out, tiny(iterations=30), stop=stop_after(1)),
        lambda out: run(out, tiny(iterations=30), minutes=0),
        lambda out: run(out, tiny(iterations=10)),
        leave,
        lambda out: leave(out, at="warning"),
    ],
    ids=["stop", "minutes", "finished", "leave", "leave at the warning"],
)
def test_run_that_ends_while_it_is_stuck_keeps_what_it_had(end, tmp_path, monkeypatch):
    monkeypatch.setattr(divergence, "AT_LIMIT", 0.0)
    rows = end(tmp_path / "run")
    assert newest(tmp_path / "run").iteration == 0
    assert celo2.load(tmp_path / "run" / "rule.safetensors").origin["iterations"] == 0
    if rows[-1]["kind"] == "end":
        assert "what iteration 0 saved is kept" in of_kind(rows, "warning")[-1]["cause"]


def test_leaving_at_the_row_of_an_exploded_rule_keeps_the_one_before(tmp_path):
    rows = metatrain(tiny(), tmp_path / "run", limits=Limits(weight_norm=0.1))
    assert next(row for row in rows if row["kind"] == "train")["iteration"] == 10
    rows.close()
    assert newest(tmp_path / "run").iteration == 0


def test_try_that_was_given_up_leaves_no_row_and_no_best_rule(tmp_path):
    out = tmp_path / "run"
    rows = run(out, try_rule=lambda rule: None, try_every=5)
    assert of_kind(rows, "heldout") == [] and rows[-1]["reason"] == "finished"
    assert not (out / "best.safetensors").exists()
    assert newest(out).meta["tried"] is None


def test_old_checkpoint_is_renewed_before_a_try(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "SAVE_SECONDS_BEFORE_TRY", -1.0)
    options = {"try_rule": lambda rule: {"score": 1.0}, "try_every": 20}
    run(tmp_path / "run", tiny(iterations=20), **options)
    assert list_iterations(tmp_path / "run" / "checkpoints") == [0, 10, 20]


def test_stop_is_asked_before_each_problem_of_a_try(monkeypatch):
    tuned, answers = [], iter([False, False, True])
    monkeypatch.setattr(heldout, "tune", lambda problem, rule: tuned.append(problem) or {})
    monkeypatch.setattr(heldout, "compare", lambda problem, result: {"score": 1.0})
    problems = {name: name for name in ("a", "b", "c")}
    assert heldout.try_rule(GOOD, problems, lambda: next(answers)) is None
    assert tuned == ["a", "b"]
    assert heldout.try_rule(GOOD, problems)["score"] == 1.0


def test_signal_gives_a_try_up(monkeypatch):
    monkeypatch.setattr(heldout, "problems", lambda size: {"never": None})
    asked = Asked()
    asked.signal = 15
    try_rule = meta_train._held_out(meta_train.parse(["--out", "x"]), asked)
    assert try_rule is not None and try_rule(GOOD) is None


START = {"kind": "start", "iteration": 0, "data": ["digits"], "devices": 1, "platform": "cpu"}
HELD_OUT = {"kind": "heldout", "iteration": 1, "score": -0.1}


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the command on rows that are given."""
    monkeypatch.setattr(meta_train, "start_devices", lambda launch, default: None)

    def call(*rows: dict) -> int:
        monkeypatch.setattr(meta_train, "metatrain", lambda *_, **__: iter(rows))
        return meta_train.main(["--out", str(tmp_path / "run"), *FLAGS])

    return call


@pytest.mark.parametrize(("reason", "code"), [("stopped", 143), ("time is up", 0)])
def test_process_that_another_one_s_signal_stopped_says_so(command, reason, code):
    assert command(START, {"kind": "end", "iteration": 1, "reason": reason}) == code


@pytest.mark.parametrize(("data", "times"), [("digits", 1), ("mnist", 0)])
def test_problems_on_the_images_of_training_are_named_once(command, capsys, data, times):
    row = HELD_OUT | {"problems": {"mlp": {}, "convnet": {}, "transformer": {}}}
    end = {"kind": "end", "iteration": 1, "reason": "finished"}
    assert command(START | {"data": [data]}, row, row, end) == 0
    err = capsys.readouterr().err
    assert err.count("learns on the same images as mlp, convnet:") == times


def test_status_of_a_folder_of_run_says_so(tmp_path, capsys):
    RunFolder(tmp_path).write_config({"config": {"task": "digits-mlp", "steps": 10}, "data": {}})
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "is a folder of `celo2 run`, not of `celo2 meta-train`" in capsys.readouterr().err
