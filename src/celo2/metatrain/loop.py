"""Meta-training as a job of the run engine: iterations, held-out tries, rules."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import numpy as np

from celo2 import rulefile
from celo2.metatrain.config import MetaConfig, from_fields
from celo2.metatrain.divergence import Limits, Streaks, inspect
from celo2.metatrain.families import Source, load_families
from celo2.metatrain.outer import MetaMetrics, MetaState, Program, build, make_mesh
from celo2.rule import Rule
from celo2.runs import checkpoint, records
from celo2.runs.engine import SAVE_SECONDS, Advanced, Job, run_job
from celo2.runs.fields import differences, to_fields
from celo2.runs.folder import RunFolder
from celo2.runs.machine import version
from celo2.runs.processes import is_primary
from celo2.runs.records import Row
from celo2.tasks import Task

CHUNK = 10  # most iterations between two rows
SAVE_SECONDS_BEFORE_TRY = 60.0  # a try takes a minute, in which a run may be killed
RULE, BEST = "rule.safetensors", "best.safetensors"  # files of a run's folder

TryRule = Callable[[Rule], dict[str, Any] | None]


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
    try_rule: TryRule | None = None,
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
    if try_every < 1:
        raise ValueError(f"try_every={try_every} must be at least 1.")
    folder = RunFolder(Path(out))
    config = from_fields(to_fields(config))  # so that 1 and 1.0 are the same
    periods = [p for p in (CHUNK, checkpoint_every, try_every if try_rule else None) if p]

    def make() -> Job:
        continues = resume and bool(checkpoint.list_iterations(folder.checkpoints))
        start = None if init_from is None or continues else matching_rule(config, init_from)
        source = load_families(config, data, task)
        program = build(config, source.families, make_mesh())
        run = Run(folder, config, source, program, limits or Limits(), try_rule, try_every)
        if start is not None:
            run.begun_from = _describe(start, init_from)
        return _job(run, start, tuple(periods))

    yield from run_job(
        folder,
        make,
        resume=resume,
        checkpoint_every=checkpoint_every,
        minutes=minutes,
        stop=stop,
    )


@dataclass
class Run:
    """What a run is, and what it remembers besides its state."""

    folder: RunFolder
    config: MetaConfig
    source: Source
    program: Program
    limits: Limits
    try_rule: TryRule | None
    try_every: int
    begun_from: dict[str, str] | None = None  # the rule it was started from
    best: dict[str, Any] | None = None  # iteration and result of the best rule so far
    tried: dict[str, Any] | None = None  # the same of the newest try
    streaks: Streaks = Streaks()
    elapsed_before: float = 0.0  # seconds, in earlier processes
    started: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return round(self.elapsed_before + time.monotonic() - self.started, 2)


def _job(run: Run, start: Rule | None, periods: tuple[int, ...]) -> Job:
    config, total = run.config, run.config.iterations

    def recall(meta: Mapping[str, Any]) -> None:
        run.elapsed_before, run.begun_from = meta["elapsed"], meta["begun_from"]
        run.best, run.tried = meta["best"], meta["tried"]

    def memory() -> dict[str, Any]:
        names = ("elapsed", "begun_from", "best", "tried")
        return {name: getattr(run, name) for name in names}

    def advance(state: MetaState, done: int, until: int) -> Advanced:
        began = time.monotonic()
        state, metrics = run.program.run(state, until - done)
        return _inspected(run, state, until, metrics, time.monotonic() - began)

    def follow(state: MetaState, done: int) -> Iterator[Row]:
        if run.try_rule is not None and _is_tried(run, done):
            yield from _try(run, run.try_rule, state, done)

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
        follow=follow,
        memory=memory,
        recall=recall,
        export=lambda state, done: rulefile.save(_rule(run, state, done), run.folder.path / RULE),
        save_seconds=lambda until: (
            SAVE_SECONDS_BEFORE_TRY
            if run.try_rule is not None and _is_tried(run, until)
            else SAVE_SECONDS
        ),
        save_first=True,
    )


def _inspected(
    run: Run, state: MetaState, done: int, metrics: MetaMetrics, seconds: float
) -> Advanced:
    """The iterations up to `done` as rows: their means, and what went wrong in them."""
    rows = [train_row(run, done, metrics, seconds)]
    families = run.source.families
    highest = sum(f.problems * f.highest_loss for f in families)
    highest /= sum(f.problems for f in families)
    count = sum(np.size(w) for w in state.weights.values())
    run.streaks, troubles = inspect(run.streaks, run.limits, highest, count, done, metrics)
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


def train_row(run: Run, done: int, metrics: MetaMetrics, seconds: float) -> Row:
    """The means over these iterations, and the weights' norm at the end."""
    families = run.source.families
    names = [name for family in families for name in family.names]
    losses = metrics.family_loss.mean(axis=0)
    row = {
        "kind": "train",
        "iteration": done,
        "loss": _short(metrics.loss.mean()),
        "family_loss": {name: _short(loss) for name, loss in zip(names, losses, strict=True)},
        "gradient_norm": _short(metrics.gradient_norm.mean()),
        "agreement": _short(metrics.agreement.mean()),
        "update_norm": _short(metrics.update_norm.mean()),
        "weight_norm": _short(metrics.weight_norm[-1]),
        "bad_entries": int(metrics.bad_entries.sum()),
        "inner_steps": int(metrics.inner_steps.sum()),
        "inner_steps_per_second": _short(metrics.inner_steps.sum() / seconds),
        "elapsed": run.elapsed,
    }
    if len(families) > 1:
        shares = metrics.seconds.sum(axis=0) / metrics.seconds.sum()
        labels = [family.names[0].partition("/")[0] for family in families]
        row["time"] = {label: _short(s) for label, s in zip(labels, shares, strict=True)}
    return row


def _try(run: Run, try_rule: TryRule, state: MetaState, done: int) -> Iterator[Row]:
    """Tries the current rule, and keeps it if it is the best so far."""
    result = records.clean(try_rule(_rule(run, state, done)))
    if result is None:
        return
    run.tried = {"iteration": done, **result}
    score = result.get("score")
    if score is not None and (run.best is None or score < run.best["score"]):
        run.best = run.tried
        if is_primary():
            rulefile.save(_rule(run, state, done), run.folder.path / BEST)
    yield {"kind": "heldout", **run.tried, "elapsed": run.elapsed}


def _is_tried(run: Run, iteration: int) -> bool:
    last = iteration == run.config.iterations > run.try_every
    return iteration % run.try_every == 0 or last


def _rule(run: Run, state: MetaState, done: int) -> Rule:
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
        **({"heldout": run.tried} if run.tried else {}),
    }
    return Rule(run.config.rule, {k: np.asarray(w) for k, w in state.average.items()}, origin)


def _start_row(run: Run, done: int) -> Row:
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
    """In what a stored run differs, a line each.

    `iterations` may change under a constant learning rate, which does not depend on it.
    """
    unlike = differences(config, from_fields(stored["config"]))
    if config.decay == "constant":
        unlike.pop("iterations", None)
    lines = [f"{name} is {new!r}, was {old!r}" for name, (new, old) in unlike.items()]
    old_data = stored["data"]
    for name in sorted(checksums.keys() | old_data.keys()):
        new, old = (sums.get(name, "absent")[:12] for sums in (checksums, old_data))
        if checksums.get(name) != old_data.get(name):
            lines.append(f"data {name} has SHA-256 {new}, had {old}")
    return lines


def matching_rule(config: MetaConfig, init_from: Rule | str | PathLike) -> Rule:
    """The rule to start from, if it computes what the config says."""
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


def _short(number: Any) -> float:
    return float(f"{float(number):.6g}")
