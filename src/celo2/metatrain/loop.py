"""Meta-training as a job of the run engine: iterations, divergence, held-out tries, rules."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from celo2 import rulefile
from celo2.metatrain.config import MetaConfig, from_fields
from celo2.metatrain.families import Source, load_families
from celo2.metatrain.heldout import Tries, begin_try, end_try, resume_try, stop_tries
from celo2.metatrain.outer import MetaMetrics, MetaState, Program, build
from celo2.rule import Rule
from celo2.runs import checkpoint, records
from celo2.runs.engine import Advanced, Job, run_job
from celo2.runs.fields import describe_differences, differences, to_fields
from celo2.runs.folder import RunFolder
from celo2.runs.processes import is_primary, make_mesh, some_process, version
from celo2.runs.records import Row, shorten
from celo2.tasks import Task

CHUNK = 10  # most iterations between two rows
RULE, BEST, HELDOUT = "rule.safetensors", "best.safetensors", "heldout"  # in a run's folder
POLL_SECONDS = 0.2
AT_LIMIT = 0.99  # of the highest loss
STREAK_CAUSES = {
    "stuck": "the meta-loss is at its limit",
    "blind": "no entry of the meta-gradient is finite",
    "idle": "the meta-gradient is zero, so the rule learns nothing,",
}


@dataclass(frozen=True)
class Limits:
    """When a run is given up.

    Args:
        weight_norm: norm of the rule's weights above which it has exploded.
        patience: iterations in a row that may go wrong.
    """

    weight_norm: float = 1e3
    patience: int = 100

    def __post_init__(self):
        if self.patience < 1:
            raise ValueError(f"patience={self.patience} must be at least 1.")
        if not self.weight_norm > 0:
            raise ValueError(f"weight_norm={self.weight_norm} must be positive.")


class Trouble(NamedTuple):
    """A problem at an iteration; a `fatal` one ends the run."""

    iteration: int
    cause: str
    fatal: bool


class Streaks(NamedTuple):
    """For how many iterations in a row something was wrong."""

    stuck: int = 0  # the loss was at its limit
    blind: int = 0  # no entry of the gradient was finite
    idle: int = 0  # neither, and the gradient was zero

    @property
    def bad(self) -> bool:
        """Whether the rule may have become worse; an idle one has not changed."""
        return self.stuck > 0 or self.blind > 0


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
    try_command: Sequence[str] | None = None,
    try_every: int = 2000,
    limits: Limits | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Row]:
    """Meta-trains a rule in the folder `out`, and yields what it records, row by row.

    A row's `kind` is start, train, heldout, warning or end. Leaving the loop early saves first.

    Args:
        config: the run.
        out: its folder; one process at a time may write to it.
        data: folder of the image sets; by default CELO2_DATA, else the cache folder.
        task: a task of your own in place of the images; or name one in the config.
        resume: continue from the newest checkpoint, if there is one.
        init_from: the rule a new run starts from, with the same RuleConfig.
        minutes: after which the run saves and stops.
        checkpoint_every: iterations between checkpoints; by default as many as take 5 minutes.
        try_command: tries a rule file, whose path is added to it, on held-out problems, such as
            ("celo2", "try", "--json"). It runs beside this process and prints a JSON object; the
            lower its `score`, the better. The best rule so far is kept as best.safetensors.
        try_every: iterations between those tries, or more where one takes longer than that; a
            longer run is tried at its end too, and waits for it.
        limits: when a diverging run is given up, with a Diverged error.
        stop: asked between calls of up to ten iterations; True saves and stops.

    >>> from celo2.metatrain import PRESETS, metatrain
    >>> for row in metatrain(PRESETS["celo2"], "runs/first", minutes=5):  # doctest: +SKIP
    ...     print(row)
    """
    if try_every < 1:
        raise ValueError(f"try_every={try_every} must be at least 1.")
    if minutes is not None and not minutes >= 0:
        raise ValueError(f"minutes={minutes} must not be negative.")
    folder = RunFolder(Path(out))
    config = from_fields(to_fields(config))  # so that 1 and 1.0 are the same
    periods = [p for p in (CHUNK, checkpoint_every, try_every if try_command else None) if p]
    tries = Tries(folder.path / HELDOUT, try_command, try_every) if try_command else None

    def make() -> Job:
        continues = resume and bool(checkpoint.list_iterations(folder.checkpoints))
        start = None if init_from is None or continues else matching_rule(config, init_from)
        source = load_families(config, data, task)
        program = build(config, source.families, make_mesh())
        run = MetaRun(folder, config, source, program, limits or Limits(), tries, stop)
        if start is not None:
            run.begun_from = _describe(start, init_from)
        return _meta_job(run, start, tuple(periods))

    try:
        yield from run_job(
            folder,
            make,
            resume=resume,
            checkpoint_every=checkpoint_every,
            minutes=minutes,
            stop=stop,
        )
    finally:
        if tries is not None:
            stop_tries(tries)


@dataclass
class MetaRun:
    """A run, and what changes during it besides the meta-trainer's state."""

    folder: RunFolder
    config: MetaConfig
    source: Source
    program: Program
    limits: Limits
    tries: Tries | None
    stop: Callable[[], bool]
    begun_from: dict[str, str] | None = None  # the rule it was started from
    heldout: list[Row] = field(default_factory=list)  # the rows of tries
    streaks: Streaks = Streaks()
    elapsed_before: float = 0.0  # seconds, in earlier processes
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return round(self.elapsed_before + time.monotonic() - self.started, 2)


def _meta_job(run: MetaRun, start: Rule | None, periods: tuple[int, ...]) -> Job:
    config, total = run.config, run.config.iterations

    def recall(meta: Mapping[str, Any]) -> None:
        run.elapsed_before, run.begun_from = meta["elapsed"], meta["begun_from"]
        rows = records.read(run.folder.records)
        run.heldout = [row for row in rows if row.get("kind") == "heldout"]
        if run.tries is not None and is_primary():
            newest = max((row["iteration"] for row in run.heldout), default=0)
            resume_try(run.tries, newest, meta["iteration"])

    def advance(state: MetaState, done: int, until: int) -> Advanced:
        began = time.monotonic()
        state, metrics = run.program.run(state, until - done)
        return _check_and_report(run, state, until, metrics, time.monotonic() - began)

    return Job(
        count="iteration",
        total=total,
        identity={"config": to_fields(config), "data": run.source.checksums, "version": version()},
        differences=lambda stored: _unlike(config, run.source.checksums, stored),
        abstract=run.program.abstract,
        begin=lambda: run.program.init(None if start is None else start.weights),
        advance=advance,
        periods=periods,
        first_rows=lambda state, done: [_start_row(run, done)],
        last_row=lambda state, done, reason: {"kind": "end", "iteration": done, "reason": reason},
        follow=lambda state, done: _try(run, state, done),
        memory=lambda: {"elapsed": run.elapsed, "begun_from": run.begun_from},
        recall=recall,
        export=lambda state, done: rulefile.save(_rule(run, state, done), run.folder.path / RULE),
        save_first=True,
    )


def _check_and_report(
    run: MetaRun, state: MetaState, done: int, metrics: MetaMetrics, seconds: float
) -> Advanced:
    """The result of the iterations up to `done`: a row of means, and warnings."""
    rows = [train_row(run, done, metrics, seconds)]
    families = run.source.families
    highest = sum(f.problems * f.highest_loss for f in families)
    highest /= sum(f.problems for f in families)
    count = sum(np.size(w) for w in state.weights.values())
    run.streaks, troubles = check_iterations(run.streaks, run.limits, highest, count, done, metrics)
    rows += [{"kind": "warning", **trouble._asdict()} for trouble in troubles]
    fatal = next((trouble for trouble in troubles if trouble.fatal), None)
    finite = all(np.isfinite(w).all() for w in state.average.values())
    return Advanced(
        state,
        done,
        rows,
        sound=finite and not run.streaks.bad and fatal is None,
        fatal=None
        if fatal is None
        else f"Given up at iteration {fatal.iteration}: {fatal.cause}; start anew from the last "
        "good rule with a lower learning rate",
    )


def train_row(run: MetaRun, done: int, metrics: MetaMetrics, seconds: float) -> Row:
    """The means over these iterations, and the weights' norm at the end."""
    families = run.source.families
    names = [name for family in families for name in family.names]
    losses = metrics.family_loss.mean(axis=0)
    row = {
        "kind": "train",
        "iteration": done,
        "loss": shorten(metrics.loss.mean()),
        "family_loss": {name: shorten(loss) for name, loss in zip(names, losses, strict=True)},
        "gradient_norm": shorten(metrics.gradient_norm.mean()),
        "agreement": shorten(metrics.agreement.mean()),
        "update_norm": shorten(metrics.update_norm.mean()),
        "weight_norm": shorten(metrics.weight_norm[-1]),
        "bad_entries": int(metrics.bad_entries.sum()),
        "inner_steps": int(metrics.inner_steps.sum()),
        "inner_steps_per_second": shorten(metrics.inner_steps.sum() / seconds),
        "elapsed": run.elapsed,
    }
    if len(families) > 1:
        shares = metrics.seconds.sum(axis=0) / metrics.seconds.sum()
        labels = [family.names[0].partition("/")[0] for family in families]
        row["time"] = {label: shorten(s) for label, s in zip(labels, shares, strict=True)}
    return row


def _try(run: MetaRun, state: MetaState, done: int) -> Iterator[Row]:
    """Starts a try when one is due and none is running, and yields the results of tries.

    At the end of a run it waits for the last one, unless the run is asked to stop.
    """
    tries, total = run.tries, run.config.iterations
    while tries is not None:
        if is_primary():
            yield from _tried(run, tries, done)
            if tries.is_due(done, total) and not tries.is_running():
                begin_try(tries, _rule(run, state, done))
        if done < total:
            return
        running = is_primary() and (tries.is_running() or tries.is_due(done, total))
        running, stopped = some_process(running, run.stop())
        if stopped or not running:
            return
        time.sleep(POLL_SECONDS)


def _tried(run: MetaRun, tries: Tries, done: int) -> Iterator[Row]:
    """The row of a try that has ended; its rule is saved if it is the best so far."""
    try:
        result = end_try(tries)
    except (ValueError, OSError) as error:
        yield {"kind": "warning", "iteration": done, "cause": str(error)}
        return
    if result is None:
        return
    result = {name: value for name, value in result.items() if name != "optimizers"}
    row = records.clean({"kind": "heldout", "iteration": tries.begun, **result})
    best = best_row(run.heldout)
    if best_row([row]) and (best is None or row["score"] < best["score"]):
        rule = rulefile.load(tries.rule_file)
        origin = {**rule.origin, "heldout": _without_kind(row)}
        rulefile.save(replace(rule, origin=origin), run.folder.path / BEST)
    run.heldout.append(row)
    yield row | {"elapsed": run.elapsed}


def best_row(rows: Sequence[Row]) -> Row | None:
    """The held-out row with the lowest score; None if none has one."""
    scored = [row for row in rows if row.get("kind") == "heldout" and row.get("score") is not None]
    return min(scored, key=lambda row: row["score"], default=None)


def _without_kind(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("kind", "elapsed")}


def _rule(run: MetaRun, state: MetaState, done: int) -> Rule:
    """The rule as it is now, with its origin."""
    origin = {
        "made_by": "celo2 meta-train",
        "version": version(),
        "iterations": done,
        "seed": run.config.seed,
        "config": to_fields(run.config),
        "data": run.source.checksums,
        "hours": round(run.elapsed / 3600, 3),
        **({"init_from": run.begun_from} if run.begun_from else {}),
        **({"heldout": _without_kind(run.heldout[-1])} if run.heldout else {}),
    }
    return Rule(run.config.rule, {k: np.asarray(w) for k, w in state.average.items()}, origin)


def _start_row(run: MetaRun, done: int) -> Row:
    return {
        "kind": "start",
        "iteration": done,
        "iterations": run.config.iterations,
        "data": [name for family in run.source.families for name in family.names],
        "version": version(),
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "platform": jax.default_backend(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
    }


def _unlike(
    config: MetaConfig, checksums: Mapping[str, str], stored: Mapping[str, Any]
) -> list[str]:
    """How a stored run differs from this one, a line for each difference.

    `iterations` may change under a constant learning rate, which does not depend on it.
    """
    ignore = ("iterations",) if config.decay == "constant" else ()
    lines = describe_differences(config, from_fields(stored["config"]), ignore)
    old_data = stored["data"]
    for name in sorted(checksums.keys() | old_data.keys()):
        new, old = (sums.get(name, "absent")[:12] for sums in (checksums, old_data))
        if checksums.get(name) != old_data.get(name):
            lines.append(f"data {name} has SHA-256 {new}, had {old}")
    return lines


def matching_rule(config: MetaConfig, init_from: Rule | str | PathLike) -> Rule:
    """The rule to start from; raises a ValueError unless it has the config's RuleConfig."""
    if config.start != "random" or config.start_mix:
        start = dict(config.start_mix) or config.start
        raise ValueError(f"start={start!r} and init_from were given: give one.")
    rule = rulefile.as_rule(init_from)
    if rule.config != config.rule:
        theirs = from_fields({"rule": to_fields(MetaConfig(rule=rule.config))["rule"]}, config)
        unlike = differences(config, theirs).items()
        raise ValueError(
            "init_from is a rule of another kind: "
            + "; ".join(f"{name} is {old!r}, not {new!r}" for name, (new, old) in unlike)
            + "."
        )
    return rule


def _describe(rule: Rule, init_from: Any) -> dict[str, str]:
    name = "a Rule" if isinstance(init_from, Rule) else os.fspath(init_from)
    if os.path.isfile(name):
        name = os.path.basename(name)  # the origin is for others, who don't have our folders
    return {"rule": name, "sha256": rulefile.digest(rule)}


def check_iterations(
    streaks: Streaks,
    limits: Limits,
    highest_loss: float,
    weights: int,
    last: int,
    metrics: MetaMetrics,
) -> tuple[Streaks, list[Trouble]]:
    """What is wrong with the iterations that end with number `last`.

    `weights` is how many the rule has. A streak is reported once, at a tenth of the patience, and
    is fatal at its end, but for an idle one; what cannot recover is fatal at once.
    """
    troubles: list[Trouble] = []
    first = last - len(metrics.loss) + 1
    warn_at = max(1, limits.patience // 10)
    for i, loss in enumerate(metrics.loss):
        iteration = first + i
        if cause := _fatal_cause(limits, float(loss), float(metrics.weight_norm[i])):
            troubles.append(Trouble(iteration, cause, True))
            break
        stuck, blind = loss >= AT_LIMIT * highest_loss, metrics.bad_entries[i] >= weights
        idle = metrics.gradient_norm[i] == 0 and not stuck and not blind
        now = (stuck, blind, idle)
        streaks = Streaks(*(n + 1 if up else 0 for n, up in zip(streaks, now, strict=True)))
        for name, length in streaks._asdict().items():
            if length == warn_at or (length == limits.patience and name != "idle"):
                cause = f"{STREAK_CAUSES[name]} for {length} iteration{'s' * (length > 1)} in a row"
                fatal = length >= limits.patience and name != "idle"
                troubles.append(Trouble(iteration, cause, fatal))
    return streaks, troubles


def _fatal_cause(limits: Limits, loss: float, weight_norm: float) -> str | None:
    if not np.isfinite(weight_norm):
        return "the rule's weights are no longer finite"
    if not np.isfinite(loss):
        return f"the meta-loss is {loss}"
    if weight_norm > limits.weight_norm:
        return f"the rule's weights have norm {weight_norm:.4g}, above {limits.weight_norm:g}"
    return None
