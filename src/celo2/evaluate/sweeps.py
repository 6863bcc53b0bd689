"""The runs of a recipe, made one after the other, or by several processes that share them.

Several processes may sweep the same folder, also from several machines that share it: each run
is locked by who makes it, and the others take the next. So is each rule that a recipe trains.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jax.sharding import Mesh

from celo2.evaluate.comparison import INDEX, Outcome, compare, name_of, read_index, read_outcome
from celo2.evaluate.config import RunConfig
from celo2.evaluate.recipe import Recipe, TrainedRule
from celo2.evaluate.training import run
from celo2.metatrain.loop import RULE, metatrain
from celo2.rulefile import load, save, write_whole
from celo2.runs import records
from celo2.runs.engine import Diverged
from celo2.runs.fields import to_fields
from celo2.runs.folder import RunTaken
from celo2.runs.processes import StopRequest, cores, is_primary, some_process

POLL_SECONDS = 0.5
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS")
Stop = Callable[[], bool]
T = TypeVar("T")
U = TypeVar("U")


class MadeRule(NamedTuple):
    """A rule that was trained, or why it was not."""

    rule: TrainedRule
    error: str | None = None


def make_rules(
    rules: Sequence[TrainedRule],
    *,
    data: str | PathLike | None = None,
    first: int = 0,
    stop: Stop = lambda: False,
) -> Iterator[MadeRule]:
    """Meta-trains a recipe's rules and yields each when it is trained.

    Trained rules are skipped and interrupted runs resumed; one that diverges does not stop the
    others.

    Args:
        rules: what to train.
        data: folder of the image sets; by default CELO2_DATA, else the cache folder.
        first: the rule to begin with; processes that share a sweep begin at different ones.
        stop: asked now and then; True saves the current run and ends.
    """
    made = _make_each(
        [*rules[first:], *rules[:first]], lambda rule: _make_rule(rule, data, stop), stop
    )
    yield from filter(None, made)  # without one that was stopped


def without_missing(recipe: Recipe, made: Iterable[MadeRule]) -> Recipe:
    """The recipe without the runs whose rule could not be trained."""
    trained = {str(rule.rule.file) for rule in made if rule.error is None}
    missing = {str(rule.file) for rule in recipe.rules} - trained
    return replace(recipe, runs=tuple(c for c in recipe.runs if c.optimizer not in missing))


def _make_each(items: Sequence[T], make: Callable[[T], U], stop: Stop) -> Iterator[U]:
    """Yields `make(item)` for each item; those locked by another process are tried again later."""
    waiting = list(items)
    while waiting:
        taken = []
        for item in waiting:
            # All processes wait here for each other, so that they work on the same item.
            if some_process(stop())[0]:
                return
            try:
                made = make(item)
            except RunTaken:
                taken.append(item)
            else:
                yield made
        waiting = taken
        if waiting:
            time.sleep(POLL_SECONDS)


def _make_rule(rule: TrainedRule, data: str | PathLike | None, stop: Stop) -> MadeRule | None:
    """The rule as its runs use it; None if it was stopped."""
    try:
        if not _is_trained(rule):
            for _ in metatrain(rule.config, rule.folder, data=data, resume=True, stop=stop):
                pass
            some_process(False)  # wait until process 0 has written the rule
    except Diverged as error:
        return MadeRule(rule, str(error))
    trained = _is_trained(rule)
    if trained and rule.used != rule.config.rule and is_primary():
        save(replace(load(rule.folder / RULE), config=rule.used), rule.file)
    some_process(False)
    return MadeRule(rule) if trained else None


def _is_trained(rule: TrainedRule) -> bool:
    """Whether the rule's file is the result of the complete run."""
    try:
        origin = load(rule.folder / RULE).origin
    except FileNotFoundError:
        return False
    whole = origin.get("iterations") == rule.config.iterations
    return whole and origin.get("config") == to_fields(rule.config)


def sweep(
    recipe: Recipe,
    out: str | PathLike,
    *,
    data: str | PathLike | None = None,
    mesh: Mesh | None = None,
    first: int = 0,
    part: bool = False,
    stop: Stop = lambda: False,
) -> Iterator[Outcome]:
    """Makes every run of the recipe under `out`, and yields each as it ends.

    Finished runs are only read and interrupted ones resumed; one that diverges or fails does not
    stop the others. When all have ended, the best of each optimizer is run with the final seeds.
    `sweep.json` lists the runs of both stages by the names of their folders.

    Args:
        recipe: what to run.
        out: the folder of the runs' folders.
        data: folder of the data files; by default CELO2_DATA, else the cache folder.
        mesh: the devices of every run, see celo2.evaluate.run; several processes that share one
            make each run together.
        first: the tuning run to begin with; processes that share a sweep begin at different ones.
        part: the recipe is only some optimizers of a sweep: leave the others in `sweep.json`.
        stop: asked now and then; True saves the current run and ends the sweep.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)

    def make(found: Outcome) -> Outcome:
        return _make_run(found, folder, stop, data=data, mesh=mesh)

    known = {config: read_outcome(config, folder) for config in recipe.runs}
    tuning = list(known.values())
    finals = _finals(recipe, tuning)  # as far as a sweep before this one came
    known |= {c: read_outcome(c, folder) for c in finals if c not in known}
    if is_primary():
        _write_index(folder, recipe, part, [c for c in finals if known[c].end is not None])
    made = []
    for outcome in _make_each([*tuning[first:], *tuning[:first]], make, stop):
        yield outcome
        made.append(outcome)
    if len(made) < len(recipe.runs) or any(outcome.stopped for outcome in made):
        return
    finals = _finals(recipe, made)
    if is_primary():
        _write_index(folder, recipe, part, finals)
    rest = [config for config in finals if config not in recipe.runs]
    yield from _make_each([known.get(c) or read_outcome(c, folder) for c in rest], make, stop)


def _finals(recipe: Recipe, tuning: Sequence[Outcome]) -> tuple[RunConfig, ...]:
    """The final runs of the best settings, by the records, which all processes read alike."""
    entries = [entry for entries in compare(tuning).values() for entry in entries]
    return recipe.finals([entry.best.config for entry in entries if entry.best.score is not None])


def _make_run(found: Outcome, folder: Path, stop: Stop, **options: Any) -> Outcome:
    """The run with its records."""
    if found.end is not None:
        return found
    target = folder / found.name
    try:
        rows = list(run(found.config, target, resume=True, stop=stop, **options))
        some_process(False)  # wait until process 0 has written its records
    except RunTaken:
        raise
    except Exception as error:  # whatever a task, an optimizer or a disk may raise
        return _failed(found, target, f"{type(error).__name__}: {' '.join(str(error).split())}")
    if not rows or rows[0]["kind"] != "start":  # it was resumed, or made by another process
        rows = records.read(target / "records.jsonl")
    made = found._replace(rows=rows, fresh=True)
    if made.end is None and some_process(stop())[0]:
        return made._replace(stopped=True)
    return _failed(made, target, "it ended without a record of that") if made.end is None else made


def _failed(found: Outcome, target: Path, error: str) -> Outcome:
    row = {"kind": "failed", "error": error[:500]}
    with suppress(OSError):  # which may be what failed in the first place
        records.append(target / "records.jsonl", row)
    return found._replace(rows=[*found.rows, row], fresh=True)


def _write_index(folder: Path, recipe: Recipe, part: bool, finals: Sequence[RunConfig]) -> None:
    ours = {config.label for config in recipe.runs}
    old = {}
    if part:
        with suppress(OSError, ValueError):  # none yet, or none that can be read
            old = read_index(folder)
    content = {"recipe": recipe.name, **recipe.texts, "warnings": recipe.warnings()}
    for stage, configs in (("tuning", recipe.runs), ("final", finals)):
        others = {n: f for n, f in old.get(stage, {}).items() if f.get("label") not in ours}
        content[stage] = others | {name_of(config): to_fields(config) for config in configs}
    write_whole(folder / INDEX, json.dumps(content, indent=1).encode() + b"\n")


def share_sweep(
    options: Sequence[str], devices: Sequence[str], runs: int, stop: StopRequest
) -> bool:
    """Makes a sweep's runs in one process per device; returns whether any of them failed.

    Args:
        options: of `celo2 sweep`, the same for all.
        devices: the accelerator of each process; an empty one leaves it the machine's own.
        runs: of the sweep; each process begins with another part of them.
        stop: asked now and then; True passes the request on.
    """
    command = [sys.executable, "-m", "celo2.cli", "sweep", *options, "--no-report"]
    with ExitStack() as stack:
        workers = []
        for i, device in enumerate(devices):
            # Sessions of their own: Ctrl-C reaches this process, which passes it on once.
            worker = subprocess.Popen(
                [*command, "--first", str(i * runs // len(devices))],
                env=dict(os.environ) | ({name: device for name in VISIBLE} if device else {}),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_on_cores(i, len(devices)),
            )
            workers.append(worker)
            stack.callback(worker.terminate)
        stop.leave = stack.close  # a second signal ends the workers at once, too
        passed_on = False
        while any(worker.poll() is None for worker in workers):
            if stop() and not passed_on:
                passed_on = True
                for worker in workers:
                    worker.terminate()
            time.sleep(POLL_SECONDS)
    return any(worker.returncode for worker in workers)


def _on_cores(index: int, count: int) -> Callable[[], None] | None:
    """A function that gives a process its part of the cores, since XLA starts a thread on each."""
    if not hasattr(os, "sched_setaffinity") or cores() < count:
        return None
    mine = sorted(os.sched_getaffinity(0))[index::count]
    return lambda: os.sched_setaffinity(0, mine)
