"""The numbers of a report, read from a sweep's folder; tables and figures only show them."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from statistics import median
from typing import NamedTuple

from celo2.evaluate.config import RunConfig, from_fields, resolve
from celo2.evaluate.find import find
from celo2.evaluate.packed import is_packed, read_packed
from celo2.evaluate.results import Best, Outcome, find_best, setting_cost
from celo2.runs import records
from celo2.runs.records import Row

BASELINE = "adamw"


class Entry(NamedTuple):
    """One optimizer on one task."""

    label: str
    best: Best
    tuning: tuple[Outcome, ...]
    seeds: tuple[Outcome, ...]  # runs of the best setting: the final ones, else those that tuned

    @property
    def lost(self) -> int:
        """Seeds of the best setting that diverged, and so have no score."""
        return sum(run.state == "diverged" for run in self.seeds)

    @property
    def diverged(self) -> int:
        """All runs that diverged, those of the final seeds among them."""
        runs = {run.name: run for run in (*self.tuning, *self.seeds)}
        return sum(run.state == "diverged" for run in runs.values())


class Sweep(NamedTuple):
    """A sweep's folder as read: what was to be run, and what became of it."""

    name: str
    index: Row  # sweep.json
    tasks: dict[str, list[Entry]]
    rows: dict[str, list[Row]]  # of every run, by the name of its folder


class Spread(NamedTuple):
    """Scores over seeds."""

    mean: float
    low: float
    high: float
    count: int


class Costs(NamedTuple):
    """Medians over an optimizer's runs on a task; None where nothing is recorded."""

    seconds_per_step: float | None
    compile_seconds: float | None
    state_bytes: float | None
    temporary_bytes: float | None


def is_sweep(folder: str | PathLike) -> bool:
    """Whether a sweep was started in the folder, or is packed in the file."""
    return (Path(folder) / "sweep.json").is_file() or is_packed(folder)


def read_sweep(folder: str | PathLike) -> Sweep:
    """What a sweep's folder or packed file holds.

    No rule or data is needed, so another machine can read it.
    """
    folder = Path(folder)
    if not is_sweep(folder):
        raise FileNotFoundError(f"{folder} has no sweep.json: give the --out of `celo2 sweep`.")
    index, packed = read_packed(folder) if is_packed(folder) else (_read_index(folder), {})
    try:
        stages = [_configs(index[stage]) for stage in ("tuning", "final")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the index of {folder} lists no runs: {error!r}.") from error
    names = dict.fromkeys(name for stage in stages for name in stage)
    rows = packed or {name: records.read(folder / name / "records.jsonl") for name in names}
    if not any(row.get("kind") == "end" for run in rows.values() for row in run):
        raise FileNotFoundError(f"no run in {folder} has ended: let `celo2 sweep` go on first.")
    if missing := [name for name in names if name not in rows]:
        raise ValueError(f"{folder} is cut off: it lists {missing[0]} and does not hold it.")
    tuning, final = ([_outcome(n, c, rows[n]) for n, c in stage.items()] for stage in stages)
    return Sweep(str(index.get("recipe", folder.name)), index, compare(tuning, final), rows)


def compare(tuning: Sequence[Outcome], final: Sequence[Outcome]) -> dict[str, list[Entry]]:
    """Every optimizer's runs and the best of them, by task."""
    tasks: dict[str, list[Entry]] = {}
    for (task, label), best in find_best(tuning).items():
        mine = tuple(o for o in tuning if (o.config.task, o.config.label) == (task, label))
        seeds = () if best.score is None else _seeds(best, final) or _seeds(best, mine)
        tasks.setdefault(task, []).append(Entry(label, best, mine, seeds))
    return tasks


def spread(scores: Iterable[float | None]) -> Spread | None:
    """The mean and the range of the scores that there are."""
    found = [score for score in scores if score is not None]
    if not found:
        return None
    return Spread(math.fsum(found) / len(found), min(found), max(found), len(found))


def baseline_of(entries: Sequence[Entry]) -> Entry | None:
    """AdamW's entry, if it has a score."""
    scored = [entry for entry in entries if spread(run.score for run in entry.seeds)]
    named = [entry for entry in scored if entry.label == BASELINE]
    return next((e for e in (*named, *scored) if e.best.config.optimizer == BASELINE), None)


def metric_of(sweep: Sweep, entry: Entry) -> tuple[str, bool]:
    """The metric by which runs are compared, and whether higher is better."""
    for run in entry.tuning:
        for row in sweep.rows[run.name]:
            if row.get("kind") == "start":
                return row["metric"], row["higher_is_better"]
    spec = find(entry.best.config.task)
    return spec.metric, spec.higher_is_better


def sensitivity(entry: Entry) -> list[tuple[float, float | None]]:
    """The score by learning rate, each at its best weight decay; None where a seed diverged."""
    settings: dict[float, dict[float, list[Outcome]]] = {}
    for run in entry.tuning:
        if run.end is not None:
            decays = settings.setdefault(run.config.learning_rate, {})
            decays.setdefault(run.config.weight_decay, []).append(run)
    points = []
    for rate, decays in sorted(settings.items()):
        runs = min(decays.values(), key=setting_cost)
        mean = spread(run.score for run in runs) if math.isfinite(setting_cost(runs)) else None
        points.append((rate, None if mean is None else mean.mean))
    return points


def edge_of(entry: Entry) -> str | None:
    """Whether the best learning rate is the `lowest` or the `highest` of those tried."""
    rates = [rate for rate, _ in sensitivity(entry)]
    best = entry.best.config.learning_rate
    if entry.best.score is None or len(rates) < 2 or min(rates) < best < max(rates):
        return None
    return "lowest" if best == min(rates) else "highest"


def costs_of(entry: Entry) -> Costs:
    """What a step costs; of the runs that did not diverge."""
    ends = [run.end for run in (*entry.tuning, *entry.seeds) if run.state == "finished" and run.end]

    def middle(field: str) -> float | None:
        found = [end[field] for end in ends if end.get(field) is not None]
        return median(found) if found else None

    return Costs(*map(middle, Costs._fields))


def _read_index(folder: Path) -> Row:
    try:
        return json.loads((folder / "sweep.json").read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / 'sweep.json'} lists no runs: {error!r}.") from error


def _configs(stage: Row) -> dict[str, RunConfig]:
    return {name: resolve(from_fields(fields)) for name, fields in stage.items()}


def _seeds(best: Best, runs: Sequence[Outcome]) -> tuple[Outcome, ...]:
    setting = replace(best.config, seed=0)
    return tuple(run for run in runs if replace(run.config, seed=0) == setting)


def _outcome(name: str, config: RunConfig, rows: Sequence[Row]) -> Outcome:
    last = rows[-1] if rows else {}
    if last.get("kind") == "failed":
        return Outcome(name, config, "failed", error=str(last.get("error")))
    if last.get("kind") != "end" or not last.get("finished"):
        return Outcome(name, config, "waiting")
    return Outcome(name, config, "diverged" if last["diverged"] else "finished", last)
