"""One run under way: advanced, recorded, tried, saved."""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from celo2 import rulefile
from celo2.metatrain.config import MetaConfig
from celo2.metatrain.folder import MetaFolder
from celo2.metatrain.outer import MetaMetrics, MetaState, Program
from celo2.rule import Rule
from celo2.runs import checkpoint, records
from celo2.runs.fields import to_fields
from celo2.runs.machine import version
from celo2.runs.processes import is_primary, some_process
from celo2.runs.records import Row

DISK_FULL = os.strerror(errno.ENOSPC)
FAILED_SAVES = 3  # in a row, after which a run stops


@dataclass
class Run:
    """What a run knows of itself; `state` is all that its future needs."""

    folder: MetaFolder
    config: MetaConfig
    names: tuple[str, ...]  # of the tasks
    families: tuple[str, ...]
    highest_loss: float  # at which the meta-loss is stuck
    checksums: dict[str, str]
    program: Program
    manager: ocp.CheckpointManager
    state: MetaState
    iteration: int
    elapsed_before: float  # seconds, in earlier processes
    begun_from: dict[str, str] | None  # the rule it was started from
    best: dict[str, Any] | None = None  # iteration and result of the best rule so far
    tried: dict[str, Any] | None = None  # the same of the newest try
    saved: int | None = None  # iteration of the newest checkpoint
    pending: bool = False  # whether that one is still being written
    sound: bool = True  # False while something is wrong: what is kept should be good
    saved_at: float = field(default_factory=time.monotonic)
    failures: int = 0
    unwritten: str | None = None  # why the last row or rule could not be written
    findings: list[Row] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return self.elapsed_before + time.monotonic() - self.started

    @property
    def weight_count(self) -> int:
        return sum(np.size(w) for w in self.state.weights.values())

    @property
    def start_row(self) -> Row:
        return {
            "kind": "start",
            "iteration": self.iteration,
            "iterations": self.config.iterations,
            "data": list(self.names),
            "version": version(),
            "devices": jax.device_count(),
            "processes": jax.process_count(),
            "platform": jax.default_backend(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
        }


def advance(run: Run, iterations: int) -> tuple[Row, MetaMetrics]:
    """Runs that many iterations; the row holds their means, and the weights' norm at the end."""
    start = time.monotonic()
    run.state, metrics = run.program.run(run.state, iterations)
    seconds = time.monotonic() - start
    run.iteration += iterations
    losses = metrics.family_loss.mean(axis=0)
    row = {
        "kind": "train",
        "iteration": run.iteration,
        "loss": _short(metrics.loss.mean()),
        "family_loss": {name: _short(loss) for name, loss in zip(run.names, losses, strict=True)},
        "gradient_norm": _short(metrics.gradient_norm.mean()),
        "agreement": _short(metrics.agreement.mean()),
        "update_norm": _short(metrics.update_norm.mean()),
        "weight_norm": _short(metrics.weight_norm[-1]),
        "bad_entries": int(metrics.bad_entries.sum()),
        "inner_steps": int(metrics.inner_steps.sum()),
        "inner_steps_per_second": _short(metrics.inner_steps.sum() / seconds),
        "elapsed": round(run.elapsed, 2),
    }
    if len(run.families) > 1:
        shares = metrics.seconds.sum(axis=0) / metrics.seconds.sum()
        row["time"] = {name: _short(s) for name, s in zip(run.families, shares, strict=True)}
    return row, metrics


def record(run: Run, row: Row) -> Row:
    """The row, also written to the records by the process that does that."""
    row = records.clean(row)
    if is_primary():
        try:
            records.append(run.folder.records, row)
        except OSError as error:
            run.unwritten = f"{run.folder.records}: {error.strerror}"
    return row


def held_out(run: Run, try_rule: Callable[[Rule], dict[str, Any] | None]) -> Iterator[Row]:
    """Tries the current rule, and keeps it if it is the best so far."""
    result = records.clean(try_rule(current_rule(run)))
    if result is None:
        return
    run.tried = {"iteration": run.iteration, **result}
    score = result.get("score")
    if score is not None and (run.best is None or score < run.best["score"]):
        run.best = run.tried
        _export(run, run.folder.best)
    yield record(run, {"kind": "heldout", **run.tried, "elapsed": round(run.elapsed, 2)})


def current_rule(run: Run) -> Rule:
    """The rule as it is now, with its origin."""
    origin = {
        "made_by": "celo2 meta-train",
        "version": version(),
        "iterations": run.iteration,
        "seed": run.config.seed,
        "config": to_fields(run.config),
        "data": run.checksums,
        "hours": round(run.elapsed / 3600, 3),
        **({"init_from": run.begun_from} if run.begun_from else {}),
        **({"heldout": run.tried} if run.tried else {}),
    }
    return Rule(run.config.rule, _host_weights(run), origin)


def save_run(run: Run, last: bool = False) -> Iterator[Row]:
    """Saves a checkpoint and the rule; yields a warning if that, or the save before, failed.

    A run that is not sound keeps those it has.
    """
    yield from _attempt(run, lambda: _settle(run))
    if not run.sound or not all(np.isfinite(w).all() for w in _host_weights(run).values()):
        if last:
            cause = f"stopped while it went wrong: what iteration {run.saved} saved is kept"
            yield record(run, {"kind": "warning", "iteration": run.iteration, "cause": cause})
        return
    if run.saved != run.iteration:
        yield from _attempt(run, lambda: _begin_save(run))
    if last:
        yield from _attempt(run, lambda: _settle(run))
    _export(run, run.folder.rule)
    if run.unwritten:
        yield record(run, {"kind": "warning", "iteration": run.iteration, "cause": run.unwritten})
        run.unwritten = None
    if run.failures >= (1 if last else FAILED_SAVES):
        close_run(run)
        raise OSError(
            f"Checkpoints cannot be saved; the newest is of iteration {run.saved}. Make room in "
            f"{run.folder.path} and continue with --resume."
        )


def close_run(run: Run) -> None:
    """Waits for the checkpoint under way, whatever becomes of it."""
    try:
        _settle(run)
        run.manager.close()
    except Exception as error:
        record(run, _failure_row(run, error))
    run.saved = _newest_saved(run)


def _settle(run: Run) -> None:
    checkpoint.finish(run.manager)
    if run.pending:
        run.pending, run.failures = False, 0


def _begin_save(run: Run) -> None:
    run.saved_at = time.monotonic()
    checkpoint.save(run.manager, int(run.state.iteration), run.state, _meta(run))
    run.saved, run.pending = run.iteration, True


def _attempt(run: Run, action: Callable[[], None]) -> Iterator[Row]:
    """Does it, or yields why it failed in some process and makes ready for the next time."""
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
        yield record(run, _failure_row(run, error))


def _failure_row(run: Run, error: Exception | None) -> Row:
    text = "another process failed" if error is None else " ".join(str(error).split())
    cause = DISK_FULL if DISK_FULL in text else text[:300]
    cause = f"a checkpoint could not be saved: {cause}"
    return {"kind": "warning", "iteration": run.iteration, "cause": cause}


def _newest_saved(run: Run) -> int | None:
    return max(checkpoint.list_iterations(run.folder.checkpoints), default=None)


def _meta(run: Run) -> dict[str, Any]:
    return {
        **identity(run.config, run.checksums),
        "elapsed": round(run.elapsed, 2),
        "begun_from": run.begun_from,
        "best": run.best,
        "tried": run.tried,
    }


def identity(config: MetaConfig, checksums: dict[str, str]) -> dict[str, Any]:
    return {"config": to_fields(config), "data": checksums, "version": version()}


def _export(run: Run, path) -> None:
    if is_primary():
        try:
            rulefile.save(current_rule(run), path)
        except OSError as error:
            run.unwritten = f"{path}: {error.strerror}"


def _host_weights(run: Run) -> dict[str, np.ndarray]:
    return {name: np.asarray(w) for name, w in run.state.average.items()}


def _short(number: Any) -> float:
    return float(f"{float(number):.6g}")
