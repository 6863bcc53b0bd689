"""One training run in a folder of its own.

The folder holds `config.json` (what the run is), `records.jsonl` (what happened), `lock`, and
`checkpoints` while it is under way. The records are JSON objects, one a line, in this order; NaN
and infinities are null:

    start   once. step 0, time (Unix), config (every field of RunConfig, resolved), rule (SHA-256
            of the rule, null without one), data (SHA-256), metric and higher_is_better (by which
            runs are compared), versions, hardware, and sizes: parameters, parameters_by_group,
            tensors, state_bytes (of the optimizer), examples_per_step, tokens_per_step.
    valid   at step 0, at every evaluate_every-th step and at the last: step, metrics.
    train   at every record_every-th step and before each valid row: step (how many were made),
            metrics (means over the steps since the last train row, each before its update), and
            of the latest update, by group: update_rms, with the learning rate in it, and
            param_rms, of the parameters before it; seconds (of training so far, without
            compilation and validation).
    resume  where a later process went on: step, time, versions, hardware.
    failed  written by a sweep: error. The run is tried again when the sweep is.
    end     last. step, finished (true), diverged (whether the loss was not finite, which ends a
            run early), metrics (of the last validation, null if diverged), score (the metric by
            which runs are compared), seconds, seconds_per_step, compile_seconds (of this program,
            which runs of a sweep share), state_bytes, temporary_bytes (of a step, as compiled),
            peak_bytes (of the device, if it tells, and of the process).

Groups are `hidden` matrices, which Celo2's rule and Muon update, and `other` tensors, which both
leave to AdamW; they are the same for all optimizers. A run that was interrupted and resumed has
the rows of one that was not, but for resume rows and times.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from celo2.evaluate import rows
from celo2.evaluate.config import RunConfig, resolve
from celo2.evaluate.feed import Feed
from celo2.evaluate.program import Program, build
from celo2.evaluate.storage import Start, check_finished, clear, find_start, identity, save
from celo2.runs import records
from celo2.runs.folder import RunFolder, locked
from celo2.runs.processes import in_primary, is_primary, some_process
from celo2.runs.records import Row

SAVE_SECONDS = 300.0


@dataclass
class Run:
    """A run under way; `state` and `step` are all that its future needs."""

    folder: RunFolder
    config: RunConfig
    program: Program
    feed: Feed
    state: Any
    step: int
    seconds: float  # of training
    saved_step: int = 0
    saved_at: float = field(default_factory=time.monotonic)


def run(
    config: RunConfig,
    out: str | PathLike,
    *,
    data: str | PathLike | None = None,
    mesh: Mesh | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    keep: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Row]:
    """Trains in the folder `out`, and yields what it records, row by row.

    A run that was stopped has no end row; one that is finished already yields its end row only.

    Args:
        config: what the run is.
        out: its folder, which only one process may write.
        data: folder of the data files; by default CELO2_DATA, else the cache folder.
        mesh: the devices to train on, in axes `data` and `model`; by default one device. Several
            processes need one over all their devices, and a file system that they share.
        resume: continue from the newest checkpoint, if there is one, else start over.
        checkpoint_every: steps between checkpoints; by default as many as take 5 minutes.
        keep: leave the last checkpoint of a finished run where it is.
        stop: asked between compiled calls; True saves and stops.

    >>> from celo2.evaluate import RunConfig, run
    >>> config = RunConfig("digits-mlp", "adamw", learning_rate=1e-2)
    >>> *_, end = run(config, "runs/first")  # doctest: +SKIP
    """
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ValueError(f"checkpoint_every={checkpoint_every} must be at least 1.")
    config = resolve(config)
    folder = RunFolder(Path(out))
    with ExitStack() as stack:
        in_primary(lambda: stack.enter_context(locked(folder)))
        end = end_row(folder.records)
        if resume and some_process(is_primary() and end is not None)[0]:
            in_primary(lambda: check_finished(folder, config))
            yield end or {"kind": "end"}
            return
        run = _open(folder, config, data, mesh, resume)
        yield from _start(run)
        yield from _train(run, checkpoint_every, keep, stop)


def end_row(path: Path) -> Row | None:
    """The end row of a finished run's records; None for any other."""
    ends = [row for row in records.read(path) if row.get("kind") == "end"]
    return ends[-1] if ends and ends[-1].get("finished") else None


def next_stop(config: RunConfig, step: int) -> int:
    """Where the next compiled call ends; it depends on the config alone, so that resumed runs
    make the same calls."""
    assert config.steps and config.evaluate_every
    periods = (config.record_every, config.evaluate_every)
    return min(config.steps, *((step // period + 1) * period for period in periods))


def _open(folder: RunFolder, config: RunConfig, data: Any, mesh: Mesh | None, resume: bool) -> Run:
    program = build(config, data, mesh)
    found = find_start(folder, program.setup, config, resume)
    found = found or Start(0, program.start(config.seed), 0.0)
    feed = program.feed(config.seed)
    return Run(folder, config, program, feed, found.state, found.step, found.seconds, found.step)


def _start(run: Run) -> Iterator[Row]:
    if run.step > 0:
        yield _record(run, rows.resume(run.step))
        return
    yield _record(run, rows.start(run.config, run.program.setup))
    yield _validate(run)


def _train(
    run: Run, checkpoint_every: int | None, keep: bool, stop: Callable[[], bool]
) -> Iterator[Row]:
    config = run.config
    assert config.steps and config.evaluate_every
    metrics, finite = None, True
    while run.step < config.steps and finite:
        asked, due = some_process(stop(), _is_due(run, checkpoint_every))
        if asked or due:
            _save(run)
        if asked:
            return
        row, finite = _advance(run)
        yield row
        if finite and (run.step % config.evaluate_every == 0 or run.step == config.steps):
            valid = _validate(run)
            metrics = valid["metrics"]
            yield valid
    if finite and metrics is None:  # a resumed run that was at its end, its valid row recorded
        metrics = _evaluate(run)
    if finite and keep:
        _save(run)
    yield _record(run, rows.end(run.program, run.step, run.seconds, metrics if finite else None))
    if not keep and is_primary():
        clear(run.folder)


def _advance(run: Run) -> tuple[Row, bool]:
    start = time.monotonic()
    last = next_stop(run.config, run.step)
    run.state, told = run.program.advance(run.config, run.feed, run.state, run.step, last)
    run.seconds += time.monotonic() - start
    run.step = told.step
    row = {
        "kind": "train",
        "step": told.step,
        "metrics": rows.shorten(told.metrics),
        **rows.shorten(told.norms),
        "seconds": round(run.seconds, 4),
    }
    return _record(run, row), told.finite


def _validate(run: Run) -> Row:
    return _record(run, {"kind": "valid", "step": run.step, "metrics": _evaluate(run)})


def _evaluate(run: Run) -> dict[str, float | None]:
    return records.clean(rows.shorten(run.program.evaluate(run.state)))


def _record(run: Run, row: Row) -> Row:
    row = records.clean(row)
    if is_primary():
        records.append(run.folder.records, row)
    return row


def _is_due(run: Run, checkpoint_every: int | None) -> bool:
    if checkpoint_every is None:
        return time.monotonic() - run.saved_at > SAVE_SECONDS
    return run.step - run.saved_step >= checkpoint_every


def _save(run: Run) -> None:
    if run.step > run.saved_step:
        meta = identity(run.config, run.program.setup) | {"seconds": run.seconds}
        save(run.folder, run.step, run.state, meta)
        run.saved_step = run.step
    run.saved_at = time.monotonic()
