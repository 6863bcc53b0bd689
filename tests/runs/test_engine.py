"""What the engine promises every run, shown by a job that only counts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting_runs import counting, go, newest, of_kind, stop_after

from celo2.runs import checkpoint, engine, records
from celo2.runs.engine import Advanced, Diverged, next_stop, run_job
from celo2.runs.folder import RunFolder, RunRefused


def test_rows_are_recorded_in_order_and_the_end_is_saved(tmp_path):
    rows = go(tmp_path)
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("start", 0),
        *(("train", step) for step in (3, 6, 9, 10)),
        ("end", 10),
    ]
    assert rows[-1]["why"] == "finished" and records.read(tmp_path / "records.jsonl") == rows
    found = newest(tmp_path)
    assert found.iteration == 10 and float(found.arrays["x"]) == 10
    assert found.meta["calls"] == 4


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_stopped_run_goes_on_where_it_was(tmp_path, calls):
    whole = of_kind(go(tmp_path / "whole"), "train")
    part = go(tmp_path / "part", stop=stop_after(calls))
    assert part[-1] == {"kind": "end", "step": 3 * calls, "why": "stopped"}
    job = counting()
    rows = go(tmp_path / "part", job, resume=True)
    assert rows[0] == {"kind": "start", "step": part[-1]["step"]}
    assert of_kind(records.read(tmp_path / "part" / "records.jsonl"), "train") == whole
    assert newest(tmp_path / "part").meta["calls"] == 4


def test_run_stopped_before_its_first_call_starts_anew(tmp_path):
    go(tmp_path, counting(save_first=False), stop=stop_after(0))
    assert checkpoint.list_iterations(tmp_path / "checkpoints") == []
    go(tmp_path, counting(save_first=False), resume=True)
    assert len(of_kind(records.read(tmp_path / "records.jsonl"), "start")) == 1


def test_random_keys_survive_a_checkpoint(tmp_path):
    go(tmp_path, stop=stop_after(1))
    seen = []
    job = counting(first_rows=lambda state, done: seen.append(state) or [])
    go(tmp_path, job, resume=True)
    assert jnp.issubdtype(seen[0]["key"].dtype, jax.dtypes.prng_key)
    drawn = [jax.random.uniform(key) for key in (seen[0]["key"], jax.random.key(0))]
    assert drawn[0] == drawn[1]


def test_leaving_the_loop_saves_first(tmp_path):
    rows = run_job(RunFolder(tmp_path), counting)
    next(row for row in rows if row.get("step") == 6)
    rows.close()
    assert newest(tmp_path).iteration == 6


def test_time_limit_lets_the_first_call_through(tmp_path):
    assert go(tmp_path, minutes=0)[-1] == {"kind": "end", "step": 3, "why": "time is up"}
    assert newest(tmp_path).iteration == 3


def test_checkpoints_come_as_often_as_asked(tmp_path):
    go(tmp_path, counting(total=12, periods=(2,)), checkpoint_every=4)
    assert checkpoint.list_iterations(tmp_path / "checkpoints") == [4, 8, 12]
    with pytest.raises(ValueError, match="checkpoint_every=0 must be at least 1"):
        go(tmp_path, checkpoint_every=0)


def test_finished_run_need_not_keep_its_checkpoints(tmp_path):
    go(tmp_path / "a", counting(keep=False))
    assert not (tmp_path / "a" / "checkpoints").exists()
    go(tmp_path / "b", counting(keep=False), stop=stop_after(1))
    assert newest(tmp_path / "b").iteration == 3


def test_finished_run_is_only_repeated(tmp_path):
    end = {"kind": "end", "step": 10}

    def never():
        raise AssertionError("the job is not needed")

    rows = list(run_job(RunFolder(tmp_path), never, resume=True, finished=lambda: end))
    assert rows == [end]


def leave(path, at="train") -> list[dict]:
    """Takes rows up to the first of that kind and leaves."""
    rows, taken = run_job(RunFolder(path), lambda: counting(bad_from=3)), []
    for row in rows:
        taken.append(row)
        if row["kind"] == at:
            break
    rows.close()
    return taken


@pytest.mark.parametrize(
    "end",
    [
        lambda path: go(path, counting(bad_from=3), stop=stop_after(1)),
        lambda path: go(path, counting(bad_from=3), minutes=0),
        lambda path: go(path, counting(bad_from=3)),
        leave,
        lambda path: leave(path, at="warning"),
    ],
    ids=["stop", "minutes", "finished", "leave", "leave at the warning"],
)
def test_unsound_state_is_not_saved_however_the_run_ends(tmp_path, end):
    rows = end(tmp_path)
    assert newest(tmp_path).iteration == 0
    if rows[-1]["kind"] == "end":
        assert "what step 0 saved is kept" in of_kind(rows, "warning")[-1]["cause"]


def test_resume_without_a_run_starts_one(tmp_path):
    rows = go(tmp_path, resume=True)
    assert rows[0]["step"] == 0 and rows[-1]["step"] == 10


def test_hopeless_run_is_given_up_with_its_last_good_checkpoint(tmp_path):
    rows = []
    with pytest.raises(Diverged, match="it is hopeless. .* what step 3 saved is in"):
        job = counting(bad_from=6, fatal_at=6)
        rows.extend(run_job(RunFolder(tmp_path), lambda: job, checkpoint_every=3))
    assert records.read(tmp_path / "records.jsonl")[-1]["why"] == "diverged"
    assert newest(tmp_path).iteration == 3


def test_existing_run_is_refused_without_resume_and_if_it_differs(tmp_path):
    go(tmp_path)
    with pytest.raises(RunRefused, match="holds a run: continue it with --resume"):
        go(tmp_path)
    with pytest.raises(RunRefused, match="holds another run: b differs. Resume with what"):
        go(tmp_path, counting(config={"b": 2}), resume=True)


def test_rows_after_the_checkpoint_are_dropped(tmp_path):
    go(tmp_path, stop=stop_after(2))
    path = tmp_path / "records.jsonl"
    records.append(path, {"kind": "train", "step": 9})
    path.write_bytes(path.read_bytes() + b'{"kind": "tra')
    go(tmp_path, resume=True)
    assert [row["step"] for row in of_kind(records.read(path), "train")] == [3, 6, 9, 10]


def test_failed_saves_are_reported_and_end_the_run_only_if_they_go_on(tmp_path, monkeypatch):
    save, calls = checkpoint.save, itertools.count(1)

    def full_disk(*arguments):
        if next(calls) in failing:
            raise OSError(28, "No space left on device")
        save(*arguments)

    monkeypatch.setattr(checkpoint, "save", full_disk)
    failing = (2, 3)
    rows = go(tmp_path / "a", counting(total=12), checkpoint_every=3)
    warnings = of_kind(rows, "warning")
    assert [row["step"] for row in warnings] == [3, 6]
    assert "No space left on device" in warnings[0]["cause"]
    assert newest(tmp_path / "a").iteration == 12
    calls, failing = itertools.count(1), range(2, 10)
    with pytest.raises(OSError, match="the newest is of step 0"):
        go(tmp_path / "b", counting(total=12), checkpoint_every=3)


def test_further_rows_come_after_those_of_the_call(tmp_path):
    job = counting(
        total=6, follow=lambda state, done: iter([{"kind": "more", "step": done}] * (done == 6))
    )
    kinds = [row["kind"] for row in go(tmp_path, job)]
    assert kinds == ["start", "train", "train", "more", "end"]
    assert [row["kind"] for row in go(tmp_path, job, resume=True)] == ["start", "more", "end"]


def test_run_can_be_over_early(tmp_path):
    def advance(state, done, until):
        return Advanced(state, 2, [{"kind": "train", "step": 2}], over=True)

    rows = go(tmp_path, counting(advance=advance))
    assert rows[-1] == {"kind": "end", "step": 2, "why": "finished"}


def test_exports_go_with_checkpoints_and_their_failure_is_told(tmp_path):
    def export(state, done):
        if done == 3:
            raise OSError(28, "No space left on device", "rule")
        exported.append((done, np.asarray(state["x"]).item()))

    exported = []
    rows = go(tmp_path, counting(total=6, export=export), checkpoint_every=3)
    assert exported == [(0, 0.0), (6, 6.0)]
    assert "rule: No space left" in of_kind(rows, "warning")[0]["cause"]


def test_next_stop_is_the_nearest_boundary():
    stops = itertools.accumulate(range(8), lambda i, _: next_stop(i, 25, [7, 10]), initial=0)
    assert list(stops)[:7] == [0, 7, 10, 14, 20, 21, 25]


def test_checkpoints_are_renewed_when_they_are_old(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "SAVE_SECONDS", -1.0)
    go(tmp_path, counting(total=9))
    assert checkpoint.list_iterations(tmp_path / "checkpoints") == [3, 6, 9]
