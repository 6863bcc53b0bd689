import json
import subprocess
import sys

import numpy as np
import pytest
from tiny_runs import TINY, digest, newest, of_kind, run, shared_build, shared_programs, tiny

import celo2
from celo2.metatrain import Diverged, Limits, loop, metatrain, status
from celo2.metatrain.families import load_families
from celo2.metatrain.loop import Streaks, check_iterations
from celo2.metatrain.outer import MetaMetrics
from celo2.rule import CELO2, Rule, initial_weights
from celo2.rulefile import digest as digest_of
from celo2.runs import records
from celo2.runs.checkpoint import digest_json
from celo2.runs.fields import to_fields
from celo2.runs.folder import RunFolder, RunRefused
from conftest import REPOSITORY

pytestmark = pytest.mark.usefixtures("shared_programs")
__all__ = ["shared_programs"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of twelve iterations that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build", shared_build)
        return out, run(out)


def test_every_iteration_is_recorded_once_with_its_numbers(whole_run):
    out, rows = whole_run
    assert [row["kind"] for row in rows] == ["start", "train", "train", "end"]
    assert records.read(out / "records.jsonl") == rows
    train = of_kind(rows, "train")
    assert [row["iteration"] for row in train] == [10, 12]
    assert train[0]["family_loss"] == {"digits": train[0]["loss"]}
    assert train[0]["inner_steps"] == 10 * 4 * 2 * 5
    assert 1 < train[0]["loss"] < 3 and train[0]["gradient_norm"] > 0
    assert rows[-1] == {"kind": "end", "iteration": 12, "reason": "finished"}


def test_rule_is_exported_with_its_origin(whole_run):
    out, _ = whole_run
    rule = celo2.load(out / "rule.safetensors")
    np.testing.assert_array_equal(rule.weights["w0"], newest(out).arrays["weights.w0"])
    assert rule.origin["iterations"] == 12 and rule.origin["seed"] == 0
    assert rule.origin["config"]["rule"]["hidden"] == [4]
    assert rule.origin["data"] == load_families(TINY).checksums
    assert rule.origin["version"] == celo2.__version__


def test_hours_of_earlier_processes_count(whole_run, tmp_path):
    def resumed_after(seconds: float) -> dict:
        out = tmp_path / str(seconds)
        run(out, minutes=0)
        path = next((out / "checkpoints" / "10" / "meta").glob("metadata"))
        meta = json.loads(path.read_text()) | {"elapsed": seconds}
        meta.pop("seal")
        path.write_text(json.dumps(meta | {"seal": digest_json(meta)}))
        run(out, resume=True)
        return celo2.load(out / "rule.safetensors").origin

    assert resumed_after(7200.0)["hours"] == pytest.approx(2.0, abs=0.02)


def test_resume_equals_uninterrupted_run(whole_run, tmp_path):
    for _ in range(4):  # more often than needed: a finished run stays as it is
        rows = run(tmp_path / "run", resume=True, minutes=0)
    assert rows[-1]["reason"] == "finished"
    assert digest(tmp_path / "run") == digest(whole_run[0])
    stored = of_kind(records.read(tmp_path / "run" / "records.jsonl"), "train")
    expected = of_kind(whole_run[1], "train")
    for ours, theirs in zip(stored, expected, strict=True):
        assert ours["iteration"] == theirs["iteration"] and ours["loss"] == theirs["loss"]


def test_how_a_run_is_cut_into_calls_does_not_change_it(whole_run, tmp_path):
    rows = run(tmp_path / "run", checkpoint_every=3)
    cuts = [row["iteration"] for row in of_kind(rows, "train")]
    assert cuts == [3, 6, 9, 10, 12]
    assert digest(tmp_path / "run") == digest(whole_run[0])


def test_resume_with_another_config_names_every_difference(whole_run):
    other = tiny(learning_rate=1.0, rule=celo2.RuleConfig(hidden=(4,), form="d_exp_m"))
    with pytest.raises(RunRefused) as caught:
        run(whole_run[0], other, resume=True)
    text = str(caught.value)
    assert "learning_rate is 1.0, was 5e-05" in text
    assert "rule.form is 'd_exp_m', was 'd'" in text
    assert "sigma" not in text


def test_resume_with_other_data_is_refused(whole_run, monkeypatch):
    other = load_families(TINY)._replace(checksums={"digits": "0" * 64})
    monkeypatch.setattr(loop, "load_families", lambda *_: other)
    with pytest.raises(RunRefused, match="data digits has SHA-256 000000000000, had"):
        run(whole_run[0], resume=True)


def test_a_run_can_be_made_longer_under_a_constant_rate(tmp_path):
    run(tmp_path / "short", tiny(iterations=3))
    run(tmp_path / "short", tiny(iterations=5), resume=True)
    run(tmp_path / "long", tiny(iterations=5))
    assert digest(tmp_path / "short") == digest(tmp_path / "long")


def test_a_run_with_cosine_decay_keeps_its_length(tmp_path):
    out = RunFolder(tmp_path)
    config = tiny(decay="cosine")
    out.write_config({"config": to_fields(config), "data": load_families(TINY).checksums})
    with pytest.raises(RunRefused, match="iterations is 13, was 12"):
        run(tmp_path, tiny(decay="cosine", iterations=13), resume=True)


def test_run_starts_from_a_given_rule(tmp_path):
    rule = Rule(TINY.rule, initial_weights(TINY.rule, np.random.default_rng(5)))
    rows = metatrain(TINY, tmp_path / "run", init_from=rule)
    next(rows)
    rows.close()  # saves, before the first iteration
    made = celo2.load(tmp_path / "run" / "rule.safetensors")
    np.testing.assert_array_equal(made.weights["w1"], rule.weights["w1"])
    assert made.origin["init_from"] == {"rule": "a Rule", "sha256": digest_of(rule)}


def test_rule_of_another_kind_is_refused_before_anything_is_written(tmp_path):
    rule = Rule(CELO2, initial_weights(CELO2, np.random.default_rng(5)))
    with pytest.raises(ValueError, match=r"rule.hidden is \[8, 8\], not \[4\]"):
        run(tmp_path / "run", init_from=rule)
    assert not RunFolder(tmp_path / "run").has_run()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"minutes": -1.0}, "minutes=-1.0 must not be negative"),
        ({"minutes": float("nan")}, "minutes=nan must not be negative"),
        ({"try_every": 0}, "try_every=0 must be at least 1"),
    ],
)
def test_wrong_times_are_refused_before_anything_is_written(option, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **option)
    assert not (tmp_path / "run").exists()


def test_start_and_a_given_rule_are_one_too_many(tmp_path):
    rule = Rule(TINY.rule, initial_weights(TINY.rule, np.random.default_rng(5)))
    with pytest.raises(ValueError, match="start='momentum' and init_from were given: give one"):
        run(tmp_path / "run", tiny(start="momentum"), init_from=rule)


def give_up(out, limits) -> list[dict]:
    rows = []
    with pytest.raises(Diverged) as caught:
        for row in metatrain(TINY, out, limits=limits, checkpoint_every=5):
            rows.append(row)
    assert rows[-1]["kind"] == "end" and rows[-1]["reason"] == "diverged"
    warning = of_kind(rows, "warning")[-1]
    assert f"iteration {warning['iteration']}: {warning['cause']}" in str(caught.value)
    return rows


def test_exploding_rule_is_given_up_and_the_last_good_one_kept(tmp_path):
    rows = give_up(tmp_path / "run", Limits(weight_norm=0.1))
    assert "weights have norm" in of_kind(rows, "warning")[0]["cause"]
    assert newest(tmp_path / "run").iteration == 0
    assert celo2.load(tmp_path / "run" / "rule.safetensors").origin["iterations"] == 0
    assert status(tmp_path / "run")["state"] == "diverged"


def test_checkpoints_wait_while_a_run_is_stuck(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "AT_LIMIT", 0.0)
    rows = give_up(tmp_path / "run", Limits(patience=11))
    first, last = of_kind(rows, "warning")
    assert (first["iteration"], first["fatal"]) == (1, False)
    assert (last["iteration"], last["fatal"]) == (11, True)
    assert newest(tmp_path / "run").iteration == 0


def test_own_task_is_meta_trained(tmp_path, monkeypatch):
    (tmp_path / "my_tasks.py").write_text(
        "import jax.numpy as jnp\n"
        "from celo2.tasks import Task\n"
        "def make():\n"
        "    return Task(lambda key: {'kernel': jnp.ones((3, 2))},\n"
        "                lambda data, key, split: data,\n"
        "                lambda params, batch: (jnp.mean((params['kernel'] - batch) ** 2), {}),\n"
        "                jnp.zeros((3, 2)))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny(task="my_tasks:make", datasets=None, problems=1, iterations=1)
    rows = run(tmp_path / "run", config)
    assert list(rows[1]["family_loss"]) == ["my_tasks:make"]
    assert 0.5 < rows[1]["loss"] < 1.5


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("nowhere", "is not module:function"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
        ("math:make", "math has no 'make'"),
        ("os:getcwd", "returned a str, not a Task"),
    ],
)
def test_wrong_task_is_named(task, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", tiny(task=task, datasets=None))


NONE = Streaks()


def metrics(loss, weight_norm=1.0, bad_entries=0, gradient_norm=1.0) -> MetaMetrics:
    given = {
        "loss": loss,
        "weight_norm": weight_norm,
        "bad_entries": bad_entries,
        "gradient_norm": gradient_norm,
    }
    columns = {name: np.broadcast_to(value, len(loss)) for name, value in given.items()}
    rest = {name: np.ones(len(loss)) for name in MetaMetrics._fields}
    return MetaMetrics(**(rest | columns))


def look(found, streaks=NONE, patience=20):
    return check_iterations(
        streaks, Limits(weight_norm=10.0, patience=patience), 3.0, 7, 100, found
    )


def test_good_iterations_are_no_trouble():
    assert look(metrics([2.0, 1.0, 2.9])) == (Streaks(), [])


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (metrics([1.0, np.nan]), "meta-loss is nan"),
        (metrics([1.0, 1.0], [1.0, np.inf]), "no longer finite"),
        (metrics([1.0, 1.0], [1.0, np.nan]), "no longer finite"),
        (metrics([1.0, 1.0], [1.0, 10.5]), "norm 10.5, above 10"),
    ],
)
def test_what_cannot_heal_is_fatal_at_its_iteration(found, cause):
    _, (trouble,) = look(found)
    assert trouble.fatal and trouble.iteration == 100 and cause in trouble.cause


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (metrics([2.99] * 10), "meta-loss is at its limit"),
        (metrics([1.0] * 10, bad_entries=7), "no entry of the meta-gradient is finite"),
    ],
)
def test_streak_is_told_once_and_fatal_at_the_end_of_patience(found, cause):
    streaks, (warning,) = look(found)
    assert not warning.fatal and warning.iteration == 92 and cause in warning.cause
    _, (fatal,) = look(found, streaks)
    assert fatal.fatal and fatal.iteration == 100
    assert "20 iterations in a row" in fatal.cause
    assert look(found, streaks, patience=21)[1] == []


def test_zero_gradient_is_told_once_and_never_fatal():
    found = metrics([1.0] * 10, gradient_norm=0.0)
    streaks, (warning,) = look(found)
    assert streaks == Streaks(idle=10) and not streaks.bad
    assert not warning.fatal and warning.iteration == 92
    assert "meta-gradient is zero, so the rule learns nothing, for 2 iter" in warning.cause
    assert look(found, streaks) == (Streaks(idle=20), [])
    one = look(metrics([1.0], gradient_norm=0.0), patience=1)
    assert [trouble.fatal for trouble in one[1]] == [False]


@pytest.mark.parametrize(("loss", "bad_entries"), [(2.99, 0), (1.0, 7)])
def test_zero_gradient_for_a_known_reason_is_not_told(loss, bad_entries):
    streaks, troubles = look(metrics([loss] * 5, 1.0, bad_entries, gradient_norm=0.0))
    assert streaks.bad and streaks.idle == 0 and len(troubles) == 1


def test_one_good_iteration_ends_a_streak():
    streaks, _ = look(metrics([2.99] * 5 + [2.0] + [2.99] * 4))
    assert streaks == Streaks(stuck=4)


def test_some_bad_entries_are_no_streak():
    assert look(metrics([1.0], bad_entries=6))[0] == Streaks()


@pytest.mark.slow
def test_example_makes_a_rule_and_uses_it(tmp_path):
    example = REPOSITORY / "examples" / "own_task.py"
    command = [sys.executable, str(example), "--out", str(tmp_path / "run"), "--iterations", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "iteration    20" in done.stdout and "own rule" in done.stdout
    assert celo2.load(tmp_path / "run" / "rule.safetensors").origin["iterations"] == 20
