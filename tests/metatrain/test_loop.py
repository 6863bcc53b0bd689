import json

import numpy as np
import pytest
from tiny_runs import TINY, digest, newest, of_kind, run, shared_build, shared_programs, tiny

import celo2
from celo2.metatrain import loop, metatrain
from celo2.metatrain.families import load_families
from celo2.rule import CELO2, Rule, initial_weights
from celo2.rulefile import digest as digest_of
from celo2.runs import records
from celo2.runs.checkpoint import digest_json
from celo2.runs.fields import to_fields
from celo2.runs.folder import RunFolder, RunRefused

pytestmark = pytest.mark.usefixtures("shared_programs")
__all__ = ["shared_programs"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of twelve iterations that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build", shared_build)
        return out, run(out)


def stop_after(iteration, rows):
    """Takes rows up to that iteration and leaves."""
    taken = []
    for row in rows:
        taken.append(row)
        if row["kind"] == "train" and row["iteration"] >= iteration:
            break
    rows.close()
    return taken


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
    rows = run(tmp_path / "run", checkpoint_every=3, try_every=4, try_rule=lambda rule: {})
    cuts = [row["iteration"] for row in of_kind(rows, "train")]
    assert cuts == [3, 4, 6, 8, 9, 10, 12]
    assert digest(tmp_path / "run") == digest(whole_run[0])


def test_leaving_the_loop_saves_first(whole_run, tmp_path):
    stop_after(10, metatrain(TINY, tmp_path / "run"))
    assert newest(tmp_path / "run").iteration == 10
    rows = run(tmp_path / "run", resume=True)
    assert rows[0]["iteration"] == 10
    assert digest(tmp_path / "run") == digest(whole_run[0])


def test_time_limit_saves_and_stops(tmp_path):
    rows = run(tmp_path / "run", tiny(iterations=10**6), minutes=0)
    assert rows[-1] == {"kind": "end", "iteration": 10, "reason": "time is up"}
    assert newest(tmp_path / "run").iteration == 10


def test_rows_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    rows = metatrain(tiny(iterations=30), tmp_path / "run", checkpoint_every=10)
    stop_after(10, rows)
    path = tmp_path / "run" / "records.jsonl"
    records.append(path, {"kind": "train", "iteration": 20, "loss": 1.0})
    path.write_bytes(path.read_bytes() + b'{"kind": "tra')
    run(tmp_path / "run", tiny(iterations=30), resume=True)
    iterations = [row["iteration"] for row in of_kind(records.read(path), "train")]
    assert iterations == [10, 20, 30]
    assert b'"tra\n' not in path.read_bytes()


def test_existing_run_is_refused_without_resume(whole_run):
    before = digest(whole_run[0])
    with pytest.raises(RunRefused, match="holds a run: continue it with --resume"):
        run(whole_run[0])
    assert digest(whole_run[0]) == before


def test_resume_without_a_run_starts_one(tmp_path):
    rows = run(tmp_path / "run", tiny(iterations=1), resume=True)
    assert rows[0]["iteration"] == 0 and rows[-1]["iteration"] == 1


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


def test_start_and_a_given_rule_are_one_too_many(tmp_path):
    rule = Rule(TINY.rule, initial_weights(TINY.rule, np.random.default_rng(5)))
    with pytest.raises(ValueError, match="start='momentum' and init_from were given: give one"):
        run(tmp_path / "run", tiny(start="momentum"), init_from=rule)


def test_best_rule_is_kept_and_survives_resuming(tmp_path):
    scores = iter([0.5, 0.1, float("nan"), 0.3])

    def try_rule(rule):
        return {"score": next(scores)}

    out = tmp_path / "run"
    rows = metatrain(tiny(iterations=20), out, try_rule=try_rule, try_every=5)
    taken = stop_after(15, rows)
    assert [row["score"] for row in of_kind(taken, "heldout")] == [0.5, 0.1]
    assert celo2.load(out / "best.safetensors").origin["iterations"] == 10
    rows = run(out, tiny(iterations=20), try_rule=try_rule, try_every=5, resume=True)
    assert [row["score"] for row in of_kind(rows, "heldout")] == [None]
    best = celo2.load(out / "best.safetensors")
    assert best.origin["heldout"] == {"iteration": 10, "score": 0.1}
    last = (out / "records.jsonl").read_text().splitlines()[-2]
    assert '"kind": "heldout"' in last and '"score": null' in last  # NaN is no JSON
