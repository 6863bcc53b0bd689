"""The engine of every long run: folder, lock, records, checkpoints, resume, several processes.

A run is a `Job`: a state of named arrays, a function that advances it, and hooks. Training a task
and meta-training a rule are its two users.
"""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

from celo2.runs import checkpoint, records
from celo2.runs.checkpoint import Checkpoint, Damage
from celo2.runs.folder import RunFolder, RunRefused, locked
from celo2.runs.processes import in_primary, is_primary, some_process
from celo2.runs.records import Row

SAVE_SECONDS = 300.0
FAILED_SAVES = 3  # in a row, after which a run stops
DISK_FULL = os.strerror(errno.ENOSPC)


class Diverged(RuntimeError):
    """A run that was given up; its last good checkpoint is kept."""


class Advanced(NamedTuple):
    """The result of one call of `Job.advance`."""

    state: Any
    done: int
    rows: Sequence[Row]
    sound: bool = True  # False: do not save this state, the one before is better
    over: bool = False  # end the run here, before its total
    fatal: str | None = None  # why the run is given up


@dataclass(frozen=True)
class Job:
    """What the engine runs.

    Args:
        count: the unit of progress, which is also its field in rows: iteration or step.
        total: the count at which the run is complete.
        identity: what a resumed run must share, as JSON: config, data, version.
        differences: compares a stored identity with this one; one line for each difference.
        abstract: shapes, dtypes and shardings of the state.
        begin: returns the state of a new run.
        advance: (state, done, until) -> Advanced. The state is donated.
        periods: calls of `advance` end at multiples of these.
        first_rows: (state, done) -> the rows to record when a process starts or resumes the run.
        last_row: (state, done, reason) -> the end row, if there is one. The reason is finished,
            stopped, time is up or diverged.
        follow: (state, done) -> further rows after a call of `advance`; it may block. Also called
            where a run is resumed at its end.
        memory: returns what a checkpoint holds besides the state, as JSON.
        recall: restores it from the checkpoint that the run is resumed from.
        export: (state, done) -> None. Writes the files that belong to a checkpoint.
        save_first: whether a new run is saved before its first call.
        keep: whether a finished run keeps its checkpoints.
    """

    count: str
    total: int
    identity: Mapping[str, Any]
    differences: Callable[[Mapping[str, Any]], list[str]]
    abstract: Any
    begin: Callable[[], Any]
    advance: Callable[[Any, int, int], Advanced]
    periods: tuple[int, ...]
    first_rows: Callable[[Any, int], Sequence[Row]]
    last_row: Callable[[Any, int, str], Row | None]
    follow: Callable[[Any, int], Iterator[Row]] = lambda state, done: iter(())
    memory: Callable[[], dict[str, Any]] = dict
    recall: Callable[[Mapping[str, Any]], None] = lambda memory: None
    export: Callable[[Any, int], None] = lambda state, done: None
    save_first: bool = False
    keep: bool = True


@dataclass
class _Run:
    """A job that is being run."""

    job: Job
    folder: RunFolder
    manager: ocp.CheckpointManager
    state: Any
    done: int
    saved: int | None  # count of the newest checkpoint
    sound: bool = True
    ended: bool = False  # whether there is nothing left to do
    pending: bool = False  # whether the newest checkpoint is still being written
    failures: int = 0
    unwritten: str | None = None  # why the last row or export could not be written
    saved_at: float = field(default_factory=time.monotonic)


def run_job(
    folder: RunFolder,
    make: Callable[[], Job],
    *,
    resume: bool = False,
    finished: Callable[[], Row | None] = lambda: None,
    checkpoint_every: int | None = None,
    minutes: float | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Row]:
    """Runs a job in its folder, and yields what it records, row by row.

    Leaving the loop early saves first.

    Args:
        folder: the run's files. One run may write to it at a time, and process 0 does.
        make: builds the job, once the folder is locked: a second run is refused before it compiles.
        resume: continue from the newest checkpoint, if there is one.
        finished: returns the end row of a run that is finished already, which is all that is then
            yielded.
        checkpoint_every: counts between checkpoints; by default as many as take 5 minutes.
        minutes: the run saves and stops after that long, but not before its first call.
        stop: asked before each call of `advance`; True saves and stops.
    """
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={checkpoint_every} must be at least 1.")
    deadline = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    with ExitStack() as stack:
        in_primary(lambda: stack.enter_context(locked(folder)))
        end = finished() if resume and is_primary() else None
        if some_process(end is not None)[0]:
            yield end or {"kind": "end"}
            return
        run, damages = _open(folder, make, resume)
        try:
            yield from _start(run, damages)
            yield from _advance_to_end(run, checkpoint_every, deadline, stop)
        except GeneratorExit:
            for _ in _save(run, last=True):
                pass
            raise
        finally:
            _close(run)
        if run.ended and not run.job.keep and is_primary():
            shutil.rmtree(folder.checkpoints, ignore_errors=True)


def next_stop(done: int, total: int, periods: Sequence[int]) -> int:
    """Where the next call of `advance` ends: at the end, or at the next multiple of a period."""
    return min(total, *((done // period + 1) * period for period in periods))


def _open(folder: RunFolder, make: Callable[[], Job], resume: bool) -> tuple[_Run, list[Damage]]:
    """The job at the newest checkpoint that every process can read, and the damaged ones."""
    in_primary(lambda: _check_new(folder, resume))
    job = make()
    in_primary(lambda: _check_same(folder, job, folder.read_config()))
    found, damages = checkpoint.read_newest(
        folder.checkpoints, checkpoint.stored_shapes(job.abstract)
    )
    in_primary(lambda: _prepare_folder(folder, job, found, damages))
    if found is None:
        state, done = job.begin(), 0
    else:
        state, done = checkpoint.to_state(job.abstract, found), found.iteration
        job.recall(found.meta)
    manager = checkpoint.open_manager(folder.checkpoints)
    return _Run(job, folder, manager, state, done, None if found is None else done), damages


def _check_new(folder: RunFolder, resume: bool) -> None:
    if folder.has_run() and not resume:
        raise RunRefused(
            f"{folder.path} holds a run: continue it with --resume, or choose another --out."
        )


def _check_same(folder: RunFolder, job: Job, stored: Mapping[str, Any] | None) -> None:
    """Raises a RunRefused that lists how a resumed run would differ from the stored one."""
    if stored is not None and (lines := job.differences(stored)):
        raise RunRefused(
            f"{folder.path} holds another run: {'; '.join(lines)}. Resume with what it was started "
            "with, or choose another --out."
        )


def _prepare_folder(
    folder: RunFolder, job: Job, found: Checkpoint | None, damages: list[Damage]
) -> None:
    """Moves damaged checkpoints aside and drops the rows after the checkpoint to resume from."""
    if found is not None:
        _check_same(folder, job, found.meta)
    elif damages:
        raise RunRefused(
            f"No checkpoint in {folder.checkpoints} can be read: "
            + "; ".join(f"{d.iteration}: {d.cause}" for d in damages)
            + f". Move {folder.path} away and start anew."
        )
    for damage in damages:
        checkpoint.put_aside(folder.checkpoints, damage.iteration, folder.damaged)
    records.cut(folder.records, -1 if found is None else found.iteration, job.count)
    folder.write_config(dict(job.identity))


def _start(run: _Run, damages: list[Damage]) -> Iterator[Row]:
    yield from (_record(run, row) for row in run.job.first_rows(run.state, run.done))
    for damage in damages:
        cause = f"the checkpoint of {run.job.count} {damage.iteration} is damaged: {damage.cause}"
        yield _warn(run, f"{cause}; put aside")
    if run.saved is None and run.job.save_first:
        yield from _save(run)


def _advance_to_end(
    run: _Run, checkpoint_every: int | None, deadline: float, stop: Callable[[], bool]
) -> Iterator[Row]:
    job, reason = run.job, "finished"
    first = run.done
    if run.done >= job.total:  # it was stopped while it waited in `follow`
        yield from (_record(run, row) for row in job.follow(run.state, run.done))
    while run.done < job.total:
        until = next_stop(run.done, job.total, job.periods)
        asked, late, due = some_process(
            stop(),
            run.done > first and time.monotonic() > deadline,
            _is_due(run, checkpoint_every),
        )
        if asked or late:
            reason = "stopped" if asked else "time is up"
            break
        if due:
            yield from _save(run)
        result = job.advance(run.state, run.done, until)
        # Before the rows are yielded: a caller who leaves the loop there has this state saved.
        run.state, run.done, run.sound = result.state, result.done, result.sound
        yield from (_record(run, row) for row in result.rows)
        if result.fatal is not None:
            if end := job.last_row(run.state, run.done, "diverged"):
                yield _record(run, end)
            _close(run)
            raise Diverged(
                f"{result.fatal}. The run was given up; what {job.count} {run.saved} saved is in "
                f"{run.folder.path}."
            )
        yield from (_record(run, row) for row in job.follow(run.state, run.done))
        if result.over:
            break
    run.ended = reason == "finished"
    if job.keep or not run.ended:
        yield from _save(run, last=True)
    end = job.last_row(run.state, run.done, reason)
    if end is not None:
        yield _record(run, end)


def _is_due(run: _Run, checkpoint_every: int | None) -> bool:
    if checkpoint_every is not None:
        return run.done - (run.saved or 0) >= checkpoint_every
    return time.monotonic() - run.saved_at > SAVE_SECONDS


def _record(run: _Run, row: Row) -> Row:
    """The row, which process 0 also appends to the records."""
    row = records.clean(row)
    if is_primary():
        try:
            records.append(run.folder.records, row)
        except OSError as error:
            run.unwritten = f"{run.folder.records}: {error.strerror}"
    return row


def _warn(run: _Run, cause: str) -> Row:
    return _record(run, {"kind": "warning", run.job.count: run.done, "cause": cause})


def _save(run: _Run, last: bool = False) -> Iterator[Row]:
    """Saves a checkpoint and exports; yields a warning if this save or the one before failed.

    A run that is not sound keeps the checkpoint it has.
    """
    yield from _attempt(run, lambda: _finish_save(run))
    if not run.sound:
        if last:
            kept = f"what {run.job.count} {run.saved} saved is kept"
            yield _warn(run, f"stopped while it went wrong: {kept}")
        return
    if run.saved != run.done and (run.done > 0 or run.job.save_first):
        yield from _attempt(run, lambda: _begin_save(run))
    if last:
        yield from _attempt(run, lambda: _finish_save(run))
    if is_primary():
        try:
            run.job.export(run.state, run.done)
        except OSError as error:
            run.unwritten = f"{error.filename}: {error.strerror}"
    if run.unwritten:
        cause, run.unwritten = run.unwritten, None
        yield _warn(run, cause)
    if run.failures >= (1 if last else FAILED_SAVES):
        _close(run)
        raise OSError(
            f"Checkpoints cannot be saved; the newest is of {run.job.count} {run.saved}. Free some "
            f"space for {run.folder.path} and continue with --resume."
        )


def _begin_save(run: _Run) -> None:
    run.saved_at = time.monotonic()
    meta = {**run.job.identity, **run.job.memory()}
    checkpoint.save(run.manager, run.done, run.state, meta)
    run.saved, run.pending = run.done, True


def _finish_save(run: _Run) -> None:
    """Waits until the checkpoint that is being written is complete."""
    run.manager.wait_until_finished()
    if run.pending:
        run.pending, run.failures = False, 0


def _attempt(run: _Run, action: Callable[[], None]) -> Iterator[Row]:
    """Calls `action`; where it fails in any process, yields a warning and reopens the manager."""
    error: Exception | None = None
    try:
        action()
    except Exception as caught:  # orbax passes on errors of many libraries
        error = caught
    if some_process(error is not None)[0]:
        folder = run.folder.checkpoints
        if is_primary():
            checkpoint.clear_unfinished(folder)
        run.manager, run.pending = checkpoint.open_manager(folder), False
        run.saved = _newest_saved(run)
        run.failures += 1
        yield _warn(run, _failure(error))


def _close(run: _Run) -> None:
    """Waits for the checkpoint that is being written and closes the manager; never raises."""
    try:
        _finish_save(run)
        run.manager.close()
    except Exception as error:
        _warn(run, _failure(error))
    run.saved = _newest_saved(run)


def _failure(error: Exception | None) -> str:
    text = "another process failed" if error is None else " ".join(str(error).split())
    cause = DISK_FULL if DISK_FULL in text else text[:300]
    return f"a checkpoint could not be saved: {cause}"


def _newest_saved(run: _Run) -> int | None:
    return max(checkpoint.list_iterations(run.folder.checkpoints), default=None)
