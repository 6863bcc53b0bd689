"""The outer loop: iterations, records, checkpoints and rules, until the run ends."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

from celo2.metatrain.config import MetaConfig
from celo2.metatrain.folder import MetaFolder
from celo2.metatrain.opening import open_run
from celo2.metatrain.run import Run, advance, close_run, held_out, record, save_run
from celo2.metatrain.watch import Diverged, Limits, Streaks, inspect
from celo2.rule import Rule
from celo2.runs.folder import locked
from celo2.runs.processes import in_primary, some_process
from celo2.runs.records import Row
from celo2.tasks import Task

CHUNK = 10  # most iterations between two rows
SAVE_SECONDS = 300.0
SAVE_SECONDS_BEFORE_TRY = 60.0  # a try takes a minute, in which a run may be killed


def metatrain(
    config: MetaConfig,
    out: str | PathLike,
    *,
    data: str | PathLike | None = None,
    task: Task | None = None,
    resume: bool = False,
    init_from: Rule | str | PathLike | None = None,
    minutes: float | None = None,
    checkpoint_every: int | None = None,
    try_rule: Callable[[Rule], dict[str, Any] | None] | None = None,
    try_every: int = 2000,
    limits: Limits | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Row]:
    """Meta-trains a rule in the folder `out`, and yields what it records, row by row.

    A row's `kind` is start, train, heldout, warning or end. Leaving the loop early saves first.

    Args:
        config: what the run is.
        out: its folder, which only one process may write.
        data: folder of the image sets; by default CELO2_DATA, else the cache folder.
        task: a task of your own in place of the images; or name one in the config.
        resume: continue from the newest checkpoint, if there is one.
        init_from: the rule a new run starts from, with the same RuleConfig.
        minutes: after which the run saves and stops.
        checkpoint_every: iterations between checkpoints; by default as many as take 5 minutes.
        try_rule: tries a rule on held-out problems; the lower the `score` it returns, the better.
            None says that the try was given up, and gives no row.
        try_every: iterations between those tries; a longer run is tried at its end too.
        limits: when a diverging run is given up, with a Diverged error.
        stop: asked between calls of up to ten iterations; True saves and stops.

    >>> from celo2.metatrain import PRESETS, metatrain
    >>> for row in metatrain(PRESETS["celo2"], "runs/first", minutes=5):  # doctest: +SKIP
    ...     print(row)
    """
    for name, value in (("checkpoint_every", checkpoint_every), ("try_every", try_every)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    limits = limits or Limits()
    deadline = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    folder = MetaFolder(Path(out))
    with ExitStack() as stack:
        in_primary(lambda: stack.enter_context(locked(folder)))
        run = open_run(folder, config, data, task, resume, init_from)
        periods = [period for period in (checkpoint_every, try_rule and try_every) if period]
        try:
            yield record(run, run.start_row)
            yield from (record(run, row) for row in run.findings)
            if run.iteration >= run.config.iterations:
                yield {"kind": "end", "iteration": run.iteration, "reason": "finished"}
                return
            yield from _iterate(
                run, limits, periods, checkpoint_every, try_rule, try_every, stop, deadline
            )
        except GeneratorExit:
            for _ in save_run(run, last=True):
                pass
            raise
        finally:
            close_run(run)


def _iterate(
    run: Run,
    limits: Limits,
    periods: list[int],
    checkpoint_every: int | None,
    try_rule: Callable[[Rule], dict[str, Any] | None] | None,
    try_every: int,
    stop: Callable[[], bool],
    deadline: float,
) -> Iterator[Row]:
    total = run.config.iterations
    streaks, reason = Streaks(), "finished"
    if run.saved is None:
        yield from save_run(run)
    coming = next_stop(run.iteration, total, periods)
    while run.iteration < total:
        row, metrics = advance(run, coming - run.iteration)
        streaks, troubles = inspect(
            streaks, limits, run.highest_loss, run.weight_count, run.iteration, metrics
        )
        # Before the row is given away: whoever leaves the loop there should not save a bad rule.
        run.sound = not (streaks.bad or any(trouble.fatal for trouble in troubles))
        yield record(run, row)
        for trouble in troubles:
            yield record(run, {"kind": "warning", **trouble._asdict()})
            if trouble.fatal:
                yield from _give_up(run, trouble.iteration, trouble.cause)
        if try_rule and _is_tried(run.iteration, total, try_every):
            yield from held_out(run, try_rule)
        coming = next_stop(run.iteration, total, periods)
        before_try = try_rule is not None and _is_tried(coming, total, try_every)
        asked, late, due = some_process(
            stop(), time.monotonic() > deadline, _is_due(run, checkpoint_every, before_try)
        )
        if asked or late:
            reason = "stopped" if asked else "time is up"
            break
        if due:
            yield from save_run(run)
    yield from save_run(run, last=True)
    yield record(run, {"kind": "end", "iteration": run.iteration, "reason": reason})


def next_stop(iteration: int, total: int, periods: list[int]) -> int:
    """Where the next row ends: at the end, or at a multiple of a period or of CHUNK."""
    return min(total, *((iteration // period + 1) * period for period in (CHUNK, *periods)))


def _is_tried(iteration: int, total: int, try_every: int) -> bool:
    return iteration % try_every == 0 or iteration == total > try_every


def _is_due(run: Run, checkpoint_every: int | None, before_try: bool) -> bool:
    if checkpoint_every is None:
        age = time.monotonic() - run.saved_at
        return age > (SAVE_SECONDS_BEFORE_TRY if before_try else SAVE_SECONDS)
    return run.iteration % checkpoint_every == 0


def _give_up(run: Run, iteration: int, cause: str) -> Iterator[Row]:
    yield record(run, {"kind": "end", "iteration": run.iteration, "reason": "diverged"})
    close_run(run)
    raise Diverged(
        f"Given up at iteration {iteration}: {cause}. The checkpoint of iteration {run.saved} and "
        f"its rule are kept in {run.folder.path}; start anew from that rule with a lower learning "
        "rate."
    )
