"""One training run in a folder of its own.

The folder holds `config.json`, `records.jsonl`, `lock`, and `checkpoints` until the run has ended.
The records are JSON objects, one a line, in this order; NaN and infinities are null:

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
    resume  where another process resumed the run: step, time, versions, hardware.
    warning for a problem that did not end the run, such as a damaged checkpoint: step, cause.
    failed  written by a sweep: error. The run is tried again when the sweep is.
    end     last. step, finished (true), diverged (whether the loss was not finite, which ends a
            run early), metrics (of the last validation, null if diverged), score (the metric by
            which runs are compared), seconds, seconds_per_step, compile_seconds (of this program,
            which runs of a sweep share), state_bytes, temporary_bytes (of a step, as compiled),
            peak_bytes (of the device, where it is known, and of the process).

Groups are `hidden` matrices, which Celo2's rule and Muon update, and `other` tensors, which both
leave to AdamW; they are the same for all optimizers. A run that was interrupted and resumed has
the rows of one that was not, but for resume rows and times.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from celo2.evaluate.config import RunConfig, config_from_fields, resolve
from celo2.evaluate.optimizers import digest_rule, load_rule
from celo2.evaluate.program import RunProgram, build_program
from celo2.runs import processes, records
from celo2.runs.engine import Advanced, Job, run_job
from celo2.runs.fields import describe_differences, to_fields
from celo2.runs.folder import RunFolder, RunRefused
from celo2.runs.records import Row


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
        config: the run.
        out: its folder; one process at a time may write to it.
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
    config = resolve(config)
    folder = RunFolder(Path(out))

    def finished() -> Row | None:
        end = end_row(folder.records)
        if end is not None:
            _check_finished(folder, config)
        return end

    yield from run_job(
        folder,
        lambda: _training_job(TrainingRun(config, build_program(config, data, mesh)), keep),
        resume=resume,
        finished=finished,
        checkpoint_every=checkpoint_every,
        stop=stop,
    )


def end_row(path: Path) -> Row | None:
    """The end row of a finished run's records; None for any other."""
    ends = [row for row in records.read(path) if row.get("kind") == "end"]
    return ends[-1] if ends and ends[-1].get("finished") else None


@dataclass
class TrainingRun:
    """A run, and what changes during it besides the trainer's state."""

    config: RunConfig
    program: RunProgram
    seconds: float = 0.0  # of training
    metrics: dict[str, float | None] | None = None  # of the newest validation
    diverged: bool = False


def _training_job(run: TrainingRun, keep: bool) -> Job:
    config, setup = run.config, run.program.setup
    assert config.steps is not None and config.evaluate_every is not None
    evaluate_every, total = config.evaluate_every, config.steps
    batches = run.program.batches(config.seed)
    identity = {
        "config": to_fields(config),
        "data": {config.task: setup.checksum},
        "rule": setup.rule,
        "version": processes.version(),
    }

    def recall(meta: Mapping[str, Any]) -> None:
        run.seconds = meta["seconds"]

    def first_rows(state: Any, done: int) -> list[Row]:
        if done > 0:
            return [{"kind": "resume", "step": done, **_about()}]
        return [_start_row(run), _validate(run, state, 0)]

    def advance(state: Any, done: int, until: int) -> Advanced:
        began = time.monotonic()
        state, found = run.program.advance(config, batches, state, done, until)
        run.seconds += time.monotonic() - began
        row = {
            "kind": "train",
            "step": found.step,
            "metrics": records.shorten(found.metrics),
            **records.shorten(found.norms),
            "seconds": round(run.seconds, 4),
        }
        rows, finite = [row], found.finite
        if finite and (found.step % evaluate_every == 0 or found.step == total):
            rows.append(_validate(run, state, found.step))
        run.diverged = not finite
        return Advanced(state, found.step, rows, sound=finite, over=not finite)

    return Job(
        count="step",
        total=total,
        identity=identity,
        differences=lambda stored: _unlike(identity, stored),
        abstract=setup.abstract,
        begin=lambda: run.program.start(config.seed),
        advance=advance,
        periods=(config.record_every, evaluate_every),
        first_rows=first_rows,
        last_row=lambda state, done, reason: (
            _end_row(run, state, done) if reason == "finished" else None
        ),
        memory=lambda: {"seconds": run.seconds},
        recall=recall,
        keep=keep,
    )


def _validate(run: TrainingRun, state: Any, step: int) -> Row:
    run.metrics = records.clean(records.shorten(run.program.evaluate(state)))
    return {"kind": "valid", "step": step, "metrics": run.metrics}


def _start_row(run: TrainingRun) -> Row:
    """The start row: the config, rule, data, sizes, versions and hardware."""
    setup = run.program.setup
    return {
        "kind": "start",
        "step": 0,
        "config": to_fields(run.config),
        "rule": setup.rule,
        "data": setup.checksum,
        "metric": setup.spec.metric,
        "higher_is_better": setup.spec.higher_is_better,
        "sizes": setup.sizes,
        **_about(),
    }


def _end_row(run: TrainingRun, state: Any, step: int) -> Row:
    """The end row; a run without a finite score has diverged."""
    if run.metrics is None and not run.diverged:  # resumed at its end, its valid row recorded
        _validate(run, state, step)
    metrics = None if run.diverged else run.metrics
    score = (metrics or {}).get(run.program.setup.spec.metric)
    return {
        "kind": "end",
        "step": step,
        "finished": True,
        "diverged": score is None,
        "metrics": metrics,
        "score": score,
        "seconds": round(run.seconds, 4),
        "seconds_per_step": run.seconds / max(1, step),
        "compile_seconds": round(run.program.compile_seconds, 3),
        "state_bytes": run.program.setup.sizes["state_bytes"],
        "temporary_bytes": run.program.temporary_bytes,
        "peak_bytes": processes.peak_bytes(),
    }


def _about() -> Row:
    return {"time": time.time(), "versions": processes.versions(), "hardware": processes.hardware()}


def _check_finished(folder: RunFolder, config: RunConfig) -> None:
    """Raises a RunRefused if a finished run has another config or rule; data are not compared."""
    stored = folder.read_config()  # none where the records were unpacked
    if stored is None:
        return
    ours = {"config": to_fields(config), "rule": digest_rule(load_rule(config.optimizer))}
    if lines := _unlike(ours, stored):
        raise RunRefused(
            f"{folder.path} holds another run, which is finished: {'; '.join(lines)}. Choose "
            "another --out."
        )


def _unlike(ours: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    mine, theirs = (config_from_fields(identity["config"]) for identity in (ours, stored))
    lines = describe_differences(mine, theirs)
    for name in ("data", "rule"):
        if name in ours and ours[name] != stored[name]:
            lines.append(f"the {name} have another SHA-256")
    return lines
