"""The results of a recipe's runs, read from their records: the best settings, costs, caveats."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np

from celo2.evaluate.config import RunConfig, config_from_fields, find_task, resolve, run_name
from celo2.evaluate.optimizers import digest_rule, load_rule
from celo2.evaluate.recipe import unlike_data, unlike_work
from celo2.rulefile import write_whole
from celo2.runs import records
from celo2.runs.records import Row

State = Literal["waiting", "stopped", "finished", "diverged", "failed"]
INDEX = "sweep.json"
KIND = "sweep"  # of a packed sweep's first row
TRAIN_ROWS = 16  # kept of each run in a packed sweep
RESAMPLES = 10_000  # of a bootstrap
LEVEL = 0.95  # of its intervals
BASELINE = "adamw"
NONE = "–"
SAME_SESSION = 24 * 3600  # seconds within which runs are taken to be of one machine and load

Point = tuple[float, float]  # step, value


class Outcome(NamedTuple):
    """A run and its records."""

    name: str  # of its folder
    config: RunConfig
    rows: Sequence[Row] = ()  # its records
    fresh: bool = False  # made by this process, not found finished
    stopped: bool = False

    @property
    def end(self) -> Row | None:
        """The end row; None for a run that has not ended."""
        last = self.rows[-1] if self.rows else {}
        return last if last.get("kind") == "end" and last.get("finished") else None

    @property
    def error(self) -> str | None:
        """Why the run failed; None for one that did not."""
        last = self.rows[-1] if self.rows else {}
        return str(last.get("error")) if last.get("kind") == "failed" else None

    @property
    def state(self) -> State:
        """Whether it waits, was stopped, finished, diverged or failed."""
        if self.error is not None:
            return "failed"
        if self.end is None:
            return "stopped" if self.stopped else "waiting"
        return "diverged" if self.end["diverged"] else "finished"

    @property
    def score(self) -> float | None:
        """The final validation metric; None for a run that has none."""
        return None if self.end is None else self.end["score"]


class Best(NamedTuple):
    """The best tuned setting of one optimizer on one task."""

    config: RunConfig  # with the first of the tuning seeds
    score: float | None  # mean over the tuning seeds; None if no setting has one
    runs: int  # tuning runs that have ended


class Entry(NamedTuple):
    """One optimizer on one task."""

    label: str
    best: Best
    tuning: tuple[Outcome, ...]
    seeds: tuple[Outcome, ...]  # runs of the best setting: the final ones, else those that tuned

    @property
    def runs(self) -> list[Outcome]:
        """All runs, each once."""
        return list({run.name: run for run in (*self.tuning, *self.seeds)}.values())

    @property
    def scores(self) -> list[float]:
        """The scores of the seeds that have one."""
        return [run.score for run in self.seeds if run.score is not None]

    @property
    def lost(self) -> int:
        """How many seeds of the best setting diverged, and so have no score."""
        return sum(run.state == "diverged" for run in self.seeds)

    @property
    def diverged(self) -> int:
        """How many runs diverged, those of the final seeds included."""
        return sum(run.state == "diverged" for run in self.runs)


class Sweep(NamedTuple):
    """A sweep's folder as read: its index, its runs and the entries of each task."""

    name: str
    index: Row  # sweep.json
    runs: list[Outcome]
    tasks: dict[str, list[Entry]]


def name_of(config: RunConfig) -> str:
    """The name of the run's folder."""
    return run_name(config, digest_rule(load_rule(config.optimizer)))


def read_outcome(config: RunConfig, out: str | PathLike) -> Outcome:
    """The run with the records that are in its folder."""
    name = name_of(config)
    return Outcome(name, config, records.read(Path(out) / name / "records.jsonl"))


def compare(tuning: Sequence[Outcome], final: Sequence[Outcome] = ()) -> dict[str, list[Entry]]:
    """Every optimizer's runs and the best setting among them, by task.

    The best setting has the best mean score over its seeds. A setting with a run that diverged or
    failed ranks last.
    """
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for run in tuning:
        groups.setdefault((run.config.task, str(run.config.label)), []).append(run)
    tasks: dict[str, list[Entry]] = {}
    for (task, label), runs in groups.items():
        settings: dict[RunConfig, list[Outcome]] = {}
        for run in runs:
            settings.setdefault(_setting(run), []).append(run)
        chosen = min(settings.values(), key=setting_cost)
        score = mean_score(chosen)
        best = Best(chosen[0].config, score, sum(run.end is not None for run in runs))
        again = [run for run in final if _setting(run) == _setting(chosen[0])]
        seeds = () if score is None else tuple(again or chosen)
        tasks.setdefault(task, []).append(Entry(label, best, tuple(runs), seeds))
    return tasks


def _setting(run: Outcome) -> RunConfig:
    return replace(run.config, seed=0)


def mean_score(runs: Sequence[Outcome]) -> float | None:
    """The mean score of a setting's seeds; None if any has none."""
    scores = [run.score for run in runs if run.score is not None]
    return math.fsum(scores) / len(scores) if len(scores) == len(runs) > 0 else None


def setting_cost(runs: Sequence[Outcome]) -> float:
    """The mean score, negated where higher is better; infinite without one."""
    mean = mean_score(runs)
    if mean is None:
        return math.inf
    return -mean if find_task(runs[0].config.task).higher_is_better else mean


def pack(sweep: Sweep, path: str | PathLike) -> int:
    """Writes the runs of a sweep that have ended to one file; returns their number."""
    ended = {run.name: run.rows for run in sweep.runs if run.end is not None}
    index = dict(sweep.index)
    for stage in ("tuning", "final"):
        index[stage] = {name: fields for name, fields in index[stage].items() if name in ended}
    lines = [{"kind": KIND, **index}]
    lines += [{"run": name, **row} for name, rows in ended.items() for row in thin_rows(rows)]
    text = "\n".join(json.dumps(line, allow_nan=False, separators=(",", ":")) for line in lines)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(path), text.encode() + b"\n")
    return len(ended)


def read_packed(path: str | PathLike) -> tuple[dict[str, Any], dict[str, list[Row]]]:
    """The index and the records of each run."""
    first, *rest = records.read(Path(path)) or [{}]
    if first.get("kind") != KIND:
        raise ValueError(f"{path} is not a packed sweep: `celo2 report SWEEP --pack` makes one.")
    index = {key: value for key, value in first.items() if key != "kind"}
    runs: dict[str, list[Row]] = {}
    for row in rest:
        name = row.pop("run")
        runs.setdefault(name, []).append(row)
    return index, runs


def unpack(path: str | PathLike, folder: str | PathLike) -> int:
    """Writes the runs of a packed file that a sweep's folder lacks; returns their number.

    A folder without an index gets the file's, so that a sweep of some labels keeps the others.
    """
    index, runs = read_packed(path)
    Path(folder).mkdir(parents=True, exist_ok=True)
    if not (target := Path(folder) / INDEX).exists():
        write_whole(target, json.dumps(index, indent=1).encode() + b"\n")
    missing = [name for name in runs if not (Path(folder) / name).exists()]
    for name in missing:
        target = Path(folder) / name
        target.mkdir(parents=True)
        for row in runs[name]:
            records.append(target / "records.jsonl", row)
    return len(missing)


def thin_rows(rows: Sequence[Row], train_rows: int = TRAIN_ROWS) -> list[Row]:
    """The rows with `train_rows` of the train rows, evenly spaced, the last included.

    >>> rows = [{"kind": "train", "step": step} for step in range(1, 7)]
    >>> [row["step"] for row in thin_rows([*rows, {"kind": "end", "step": 6}], train_rows=3)]
    [2, 4, 6, 6]
    """
    train = [row for row in rows if row.get("kind") == "train"]
    kept = {len(train) * i // train_rows - 1 for i in range(1, train_rows + 1)}
    steps = {train[i]["step"] for i in kept if i >= 0}
    return [row for row in rows if row.get("kind") != "train" or row["step"] in steps]


class ScoreRange(NamedTuple):
    """The mean and range of the scores of some seeds."""

    mean: float
    low: float
    high: float
    count: int


def is_sweep(path: str | PathLike) -> bool:
    """Whether a sweep was started in the folder, or is packed in the file."""
    return (Path(path) / INDEX).is_file() or Path(path).is_file()


def read_index(folder: Path) -> Row:
    """The index of a sweep's folder."""
    try:
        return json.loads((folder / INDEX).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / INDEX} lists no runs: {error!r}.") from error


def read_sweep(folder: str | PathLike, known: Mapping[str, Sequence[Row]] | None = None) -> Sweep:
    """The sweep in a folder or packed file; records in `known` are not read again.

    Needs no rules or data, so that another machine can read it.
    """
    folder = Path(folder)
    if not is_sweep(folder):
        raise FileNotFoundError(f"{folder} has no {INDEX}: give the --out of `celo2 sweep`.")
    index, rows = read_packed(folder) if folder.is_file() else (read_index(folder), None)
    try:
        tuning, final = (
            {name: resolve(config_from_fields(fields)) for name, fields in index[stage].items()}
            for stage in ("tuning", "final")
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the index of {folder} lists no runs: {error!r}.") from error
    names = tuning | final
    if rows is None:
        rows = dict(known or {})
        rows |= {n: records.read(folder / n / "records.jsonl") for n in names if n not in rows}
    if missing := [name for name in names if name not in rows]:
        raise ValueError(f"{folder} is cut off: it lists {missing[0]} and does not hold it.")
    runs = {name: Outcome(name, config, rows[name]) for name, config in names.items()}
    if not any(run.end is not None for run in runs.values()):
        raise FileNotFoundError(f"no run in {folder} has ended: let `celo2 sweep` continue first.")
    tasks = compare([runs[name] for name in tuning], [runs[name] for name in final])
    return Sweep(str(index.get("recipe", folder.name)), index, list(runs.values()), tasks)


def score_range(runs: Iterable[Outcome]) -> ScoreRange | None:
    """The mean and the range of the scores; None without any."""
    found = [run.score for run in runs if run.score is not None]
    if not found:
        return None
    return ScoreRange(math.fsum(found) / len(found), min(found), max(found), len(found))


class Interval(NamedTuple):
    """A statistic of scores and its confidence interval, of level LEVEL."""

    value: float
    low: float
    high: float


Statistic = Callable[[np.ndarray], np.ndarray]  # over the last axis


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """The mean of the middle half, over the last axis.

    >>> float(interquartile_mean(np.array([0.0, 3.0, 5.0, 100.0])))
    4.0
    """
    cut = scores.shape[-1] // 4
    return np.sort(scores)[..., cut : scores.shape[-1] - cut].mean(-1)


def bootstrap(
    strata: Sequence[Sequence[float]], statistic: Statistic = lambda scores: scores.mean(-1)
) -> Interval:
    """A statistic over the scores of all strata, with its percentile interval.

    A stratum is a task: its seeds are resampled among themselves, as rliable does (Agarwal et al.,
    2021), so that differences between tasks do not widen the interval. Deterministic.
    """
    random = np.random.default_rng(0)
    drawn = [random.choice(np.asarray(s, float), (RESAMPLES, len(s))) for s in strata]
    ends = np.quantile(statistic(np.hstack(drawn)), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    value = statistic(np.concatenate([np.asarray(s, float) for s in strata]))
    return Interval(float(value), *map(float, ends))


def baseline_of(entries: Sequence[Entry]) -> Entry | None:
    """AdamW's entry, if it has a score."""
    scored = [entry for entry in entries if entry.scores]
    named = [entry for entry in scored if entry.label == BASELINE]
    return next((e for e in (*named, *scored) if e.best.config.optimizer == BASELINE), None)


def metric_of(entry: Entry) -> tuple[str, bool]:
    """The metric by which runs are compared, and whether higher is better."""
    for run in entry.tuning:
        for row in run.rows:
            if row.get("kind") == "start":
                return row["metric"], row["higher_is_better"]
    spec = find_task(entry.best.config.task)
    return spec.metric, spec.higher_is_better


def sensitivity(entry: Entry) -> list[tuple[float, float | None]]:
    """The score by learning rate, each at its best weight decay; None where a seed diverged."""
    settings: dict[float, dict[float, list[Outcome]]] = {}
    for run in entry.tuning:
        if run.end is not None:
            decays = settings.setdefault(run.config.learning_rate, {})
            decays.setdefault(run.config.weight_decay, []).append(run)
    return [
        (rate, mean_score(min(decays.values(), key=setting_cost)))
        for rate, decays in sorted(settings.items())
    ]


def edge_of(entry: Entry) -> str | None:
    """Whether the best learning rate is the `lowest` or the `highest` of those tried."""
    rates = [rate for rate, _ in sensitivity(entry)]
    best = entry.best.config.learning_rate
    if entry.best.score is None or len(rates) < 2 or min(rates) < best < max(rates):
        return None
    return "lowest" if best == min(rates) else "highest"


def median_cost(entry: Entry, field: str) -> float | None:
    """The median of an end row's field over the runs that did not diverge, where it is recorded."""
    ends = [run.end for run in entry.runs if run.state == "finished" and run.end]
    found = [end[field] for end in ends if end.get(field) is not None]
    return median(found) if found else None


class Reached(NamedTuple):
    """When a run reached the baseline's final score, and the speed-up that this is."""

    steps: float
    speed_up: float


def curve(rows: Sequence[Row], kind: str, field: str, name: str) -> list[Point]:
    """`row[field][name]` by step; of a step that a resumed run has twice, the last row counts."""
    mine = [row for row in rows if row.get("kind") == kind]
    found = {row["step"]: (row.get(field) or {}).get(name) for row in mine}
    return [(step, value) for step, value in sorted(found.items()) if value is not None]


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean of the curves at the steps that they share."""
    columns = [dict(points) for points in curves]
    shared = set.intersection(*map(set, columns)) if columns else set()
    return [(s, math.fsum(c[s] for c in columns) / len(columns)) for s in sorted(shared)]


def best_curve(entry: Entry, kind: str, field: str, name: str) -> list[Point]:
    """The mean curve of the seeds that have a score."""
    runs = [run for run in entry.seeds if run.score is not None]
    return mean_curve([curve(run.rows, kind, field, name) for run in runs])


def steps_to_reach(points: Sequence[Point], target: float, higher: bool) -> float | None:
    """The step at which a curve first reaches the target, interpolated linearly; None if never.

    >>> steps_to_reach([(0, 4.0), (10, 2.0)], 2.5, higher=False)
    7.5
    """
    sign = -1.0 if higher else 1.0
    before: Point | None = None
    for step, value in points:
        excess = sign * (value - target)
        if excess <= 0:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * before[1] / (before[1] - excess)
        before = (step, excess)
    return None


def reach(entry: Entry, baseline: Entry) -> Reached | None:
    """When the mean validation curve reaches the baseline's final mean.

    None if it never does, or if a seed diverged.
    """
    if entry.lost:
        return None
    goal, steps = score_range(baseline.seeds), baseline.best.config.steps
    metric, higher = metric_of(entry)
    points = best_curve(entry, "valid", "metrics", metric)
    found = None if goal is None else steps_to_reach(points, goal.mean, higher)
    if found is None or steps is None:
        return None
    return Reached(found, steps / found if found > 0 else math.inf)


def score_table(entries: Sequence[Entry]) -> list[list[str]]:
    """The best setting of each optimizer on one task, a row each, below a header row."""
    baseline, (metric, _) = baseline_of(entries), metric_of(entries[0])
    head = ["optimizer", "best rate", "weight decay", f"final {metric}", "range of seeds", "seeds"]
    head += ["tuning runs", "diverged", f"reaches AdamW's {metric} at step", "speed-up"]
    return [head, *(_score_row(entry, baseline) for entry in entries)]


def cost_table(entries: Sequence[Entry]) -> list[list[str]]:
    """The cost of a step of each optimizer, a row each, below a header row."""
    baseline = baseline_of(entries)
    base = None if baseline is None else median_cost(baseline, "seconds_per_step")
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "milliseconds per step": ("seconds_per_step", lambda cost: f"{1e3 * cost:.3g}"),
        "against AdamW": (
            "seconds_per_step",
            lambda cost: f"{cost / base:.2f}×" if cost and base else NONE,
        ),
        "seconds to compile": ("compile_seconds", lambda cost: f"{cost:.1f}"),
        "optimizer state": ("state_bytes", _format_bytes),
        "temporaries of a step": ("temporary_bytes", _format_bytes),
    }
    rows = [["optimizer", *columns]]
    for entry in entries:
        costs = ((median_cost(entry, field), show) for field, show in columns.values())
        rows.append([entry.label, *(NONE if c is None else show(c) for c, show in costs)])
    return rows


def cost_caveats(entries: Sequence[Entry]) -> list[str]:
    """A sentence if the runs behind `cost_table` were made on unlike machines or on other days."""
    rows = [row for entry in entries for run in entry.runs for row in run.rows if "hardware" in row]
    machines = {tuple(sorted(row["hardware"].items())) for row in rows}
    times = [row["time"] for row in rows if row.get("time") is not None]
    if len(machines) < 2 and max(times, default=0) - min(times, default=0) < SAME_SESSION:
        return []
    return ["Runs on different hardware or different days: their times cannot be compared."]


def as_text(table: Sequence[Sequence[str]]) -> str:
    """A table in columns of equal width.

    >>> print(as_text([["optimizer", "loss"], ["adamw", "1.5"]]))
    optimizer  loss
    adamw      1.5
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in table)
    return "\n".join(line.rstrip() for line in lines)


def _score_row(entry: Entry, baseline: Entry | None) -> list[str]:
    best, score = entry.best, score_range(entry.seeds)
    found = None if baseline is None else reach(entry, baseline)
    missing = "not reached" if baseline is not None and score is not None else NONE
    return [
        entry.label,
        NONE if best.score is None else f"{best.config.learning_rate:g}",
        NONE if best.score is None else f"{best.config.weight_decay:g}",
        NONE if score is None else f"{score.mean:#.4g}{without_lost(entry)}",
        NONE if score is None or score.count < 2 else f"{score.low:#.4g} … {score.high:#.4g}",
        str(0 if score is None else score.count),
        str(best.runs),
        str(entry.diverged),
        missing if found is None else f"{found.steps:.0f}",
        missing if found is None else f"{found.speed_up:.2f}×",
    ]


def _format_bytes(value: float) -> str:
    """A number of bytes in the unit that fits."""
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def caveats(entries: Sequence[Entry]) -> list[str]:
    """Sentences on one task: first the tuning budgets, then the caveats of each optimizer."""
    budgets = [len(entry.tuning) for entry in entries]
    counts = ", ".join(f"{e.label} {n}" for e, n in zip(entries, budgets, strict=True))
    if len(set(budgets)) > 1:
        found = [f"Unequal tuning budgets, which favour the larger: {counts} runs."]
    else:
        found = [f"Equal tuning budgets: {budgets[0]} for each optimizer, in runs."]
    work = unlike_work([run.config for entry in entries for run in entry.tuning])
    found += [f"Not the same problem: {what}." for what in work]
    return found + [f"{entry.label}: {text}" for entry in entries for text in _caveats_of(entry)]


def data_caveats(sweep: Sweep) -> list[str]:
    """A sentence for each task whose runs were not all on the same data."""
    found = []
    for task, entries in sweep.tasks.items():
        if what := unlike_data(run.rows for entry in entries for run in entry.runs):
            found.append(f"{task}: {what}; scores cannot be compared.")
    return found


def without_lost(entry: Entry) -> str:
    """A note for a mean that leaves out seeds which diverged; empty without any."""
    return f" ({entry.lost} of {len(entry.seeds)} diverged)" if entry.lost else ""


def _caveats_of(entry: Entry) -> list[str]:
    best, found = entry.best, []
    runs = entry.runs
    if edge := edge_of(entry):
        rate = f"{best.config.learning_rate:g}"
        found.append(f"its best rate, {rate}, is the {edge} tried; others may be better.")
    if len({run.config.learning_rate for run in entry.tuning}) == 1:
        found.append("one learning rate only; it was not tuned.")
    if best.score is None:
        found.append("no setting has a score.")
    elif len(entry.scores) == 1:
        found.append("a single seed; its variance is unknown.")
    if entry.lost:
        found.append(f"{entry.lost} of {len(entry.seeds)} seeds diverged at the best rate.")
    if waiting := sum(run.state == "waiting" for run in runs):
        found.append(f"{waiting} of {len(runs)} runs have not ended.")
    if errors := [run.error for run in runs if run.state == "failed"]:
        found.append(f"{len(errors)} of {len(runs)} runs failed, as with {errors[0]}.")
    return found
