"""What the runs of a recipe came to, read from their records; tables and figures only show it."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from celo2.evaluate.config import RunConfig, find_task, from_fields, resolve, run_name
from celo2.evaluate.optimizers import load_rule
from celo2.evaluate.recipe import Recipe, unlike_data, unlike_work
from celo2.evaluate.run import end_row
from celo2.rulefile import digest, write_whole
from celo2.runs import records
from celo2.runs.records import Row

State = Literal["waiting", "stopped", "finished", "diverged", "failed"]


class Outcome(NamedTuple):
    """What became of one run."""

    name: str  # of its folder
    config: RunConfig
    state: State
    end: Row | None = None
    error: str | None = None
    fresh: bool = False  # made just now, not found finished

    @property
    def score(self) -> float | None:
        """The final validation metric; None for a run that has none."""
        return None if self.end is None else self.end["score"]


class Best(NamedTuple):
    """The best tuned setting of one optimizer on one task."""

    config: RunConfig  # with the first of the tuning seeds
    score: float | None  # mean over the tuning seeds; None if no setting has one
    runs: int  # tuning runs that have ended
    diverged: int  # of these
    final_scores: tuple[float | None, ...] = ()  # by final seed


def name_of(config: RunConfig) -> str:
    """The name of the run's folder."""
    rule = load_rule(config.optimizer)
    return run_name(config, None if rule is None else digest(rule))


def read_outcome(config: RunConfig, out: str | PathLike) -> Outcome:
    """What the run's records say."""
    name = name_of(config)
    end = end_row(Path(out) / name / "records.jsonl")
    if end is None:
        return Outcome(name, config, "waiting")
    return Outcome(name, config, "diverged" if end["diverged"] else "finished", end)


def find_best(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], Best]:
    """By task and label, the setting with the best mean score over its seeds.

    A setting of which any run diverged or failed comes last.
    """
    groups: dict[tuple[str, str], dict[RunConfig, list[Outcome]]] = {}
    for outcome in outcomes:
        config = outcome.config
        settings = groups.setdefault((config.task, str(config.label)), {})
        settings.setdefault(replace(config, seed=0), []).append(outcome)
    return {key: _best(list(settings.values())) for key, settings in groups.items()}


def summarize(recipe: Recipe, out: str | PathLike) -> dict[tuple[str, str], Best]:
    """The best of each optimizer and its final scores, as far as the records go."""
    best = find_best([read_outcome(config, out) for config in recipe.runs])
    for key, found in best.items():
        if found.score is not None:
            finals = [read_outcome(c, out) for c in recipe.finals([found.config])]
            best[key] = found._replace(final_scores=tuple(f.score for f in finals))
    return best


def _best(settings: list[list[Outcome]]) -> Best:
    chosen = min(settings, key=setting_cost)
    cost = setting_cost(chosen)
    runs = [outcome for members in settings for outcome in members]
    sign = -1.0 if find_task(chosen[0].config.task).higher_is_better else 1.0
    return Best(
        config=chosen[0].config,
        score=sign * cost if math.isfinite(cost) else None,
        runs=sum(outcome.end is not None for outcome in runs),
        diverged=sum(outcome.state == "diverged" for outcome in runs),
    )


def setting_cost(members: list[Outcome]) -> float:
    """The mean score of a setting's seeds, turned so that lower is better."""
    scores = [outcome.score for outcome in members]
    if any(score is None for score in scores):
        return math.inf
    mean = math.fsum(score for score in scores if score is not None) / len(scores)
    return -mean if find_task(members[0].config.task).higher_is_better else mean


KIND = "sweep"
TRAIN_ROWS = 16  # kept of each run


def is_packed(path: str | PathLike) -> bool:
    """Whether the path is a file that `pack` may have written."""
    return Path(path).is_file()


def pack(folder: str | PathLike, path: str | PathLike) -> int:
    """Writes a sweep's folder to a file; gives the number of runs in it."""
    folder = Path(folder)
    index = json.loads((folder / "sweep.json").read_text("utf-8"))
    names = dict.fromkeys((*index["tuning"], *index["final"]))
    ended = {name: rows for name in names if _has_ended(rows := _records(folder, name))}
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
    """Writes the runs of a file into a sweep's folder where it has none; gives their number."""
    _, runs = read_packed(path)
    missing = [name for name in runs if not (Path(folder) / name).exists()]
    for name in missing:
        target = Path(folder) / name
        target.mkdir(parents=True)
        for row in runs[name]:
            records.append(target / "records.jsonl", row)
    return len(missing)


def thin_rows(rows: Sequence[Row], train_rows: int = TRAIN_ROWS) -> list[Row]:
    """The rows without most of the train rows: `train_rows` stay, evenly spread, the last included.

    >>> rows = [{"kind": "train", "step": step} for step in range(1, 7)]
    >>> [row["step"] for row in thin_rows([*rows, {"kind": "end", "step": 6}], train_rows=3)]
    [2, 4, 6, 6]
    """
    train = [row for row in rows if row.get("kind") == "train"]
    kept = {len(train) * i // train_rows - 1 for i in range(1, train_rows + 1)}
    steps = {train[i]["step"] for i in kept if i >= 0}
    return [row for row in rows if row.get("kind") != "train" or row["step"] in steps]


def _records(folder: Path, name: str) -> list[Row]:
    return records.read(folder / name / "records.jsonl")


def _has_ended(rows: list[Row]) -> bool:
    return bool(rows) and rows[-1].get("kind") == "end" and bool(rows[-1].get("finished"))


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


class ScoreRange(NamedTuple):
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


def score_range(scores: Iterable[float | None]) -> ScoreRange | None:
    """The mean and the range of the scores that there are."""
    found = [score for score in scores if score is not None]
    if not found:
        return None
    return ScoreRange(math.fsum(found) / len(found), min(found), max(found), len(found))


def baseline_of(entries: Sequence[Entry]) -> Entry | None:
    """AdamW's entry, if it has a score."""
    scored = [entry for entry in entries if score_range(run.score for run in entry.seeds)]
    named = [entry for entry in scored if entry.label == BASELINE]
    return next((e for e in (*named, *scored) if e.best.config.optimizer == BASELINE), None)


def metric_of(sweep: Sweep, entry: Entry) -> tuple[str, bool]:
    """The metric by which runs are compared, and whether higher is better."""
    for run in entry.tuning:
        for row in sweep.rows[run.name]:
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
    points = []
    for rate, decays in sorted(settings.items()):
        runs = min(decays.values(), key=setting_cost)
        mean = score_range(run.score for run in runs) if math.isfinite(setting_cost(runs)) else None
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


Point = tuple[float, float]  # step, value


class Reached(NamedTuple):
    """When a run came to the baseline's final score, and how much sooner that is."""

    steps: float
    speed_up: float


def curve(rows: Sequence[Row], kind: str, field: str, name: str) -> list[Point]:
    """`row[field][name]` by step; a resumed run may have a step twice, of which the last counts."""
    mine = [row for row in rows if row.get("kind") == kind]
    found = {row["step"]: (row.get(field) or {}).get(name) for row in mine}
    return [(step, value) for step, value in sorted(found.items()) if value is not None]


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean of the curves at the steps that they share."""
    columns = [dict(points) for points in curves]
    shared = set.intersection(*map(set, columns)) if columns else set()
    return [(s, math.fsum(c[s] for c in columns) / len(columns)) for s in sorted(shared)]


def best_curve(sweep: Sweep, entry: Entry, kind: str, field: str, name: str) -> list[Point]:
    """The mean curve of the seeds that have a score."""
    runs = [run for run in entry.seeds if run.score is not None]
    return mean_curve([curve(sweep.rows[run.name], kind, field, name) for run in runs])


def steps_to_reach(points: Sequence[Point], target: float, higher: bool) -> float | None:
    """The step at which a curve first comes to the target, between its points on straight lines.

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


def reach(sweep: Sweep, entry: Entry, baseline: Entry) -> Reached | None:
    """When the mean validation curve comes to the baseline's final mean.

    None if it never does, or if a seed diverged.
    """
    if entry.lost:
        return None
    goal, steps = score_range(run.score for run in baseline.seeds), baseline.best.config.steps
    metric, higher = metric_of(sweep, entry)
    points = best_curve(sweep, entry, "valid", "metrics", metric)
    found = None if goal is None else steps_to_reach(points, goal.mean, higher)
    if found is None or steps is None:
        return None
    return Reached(found, steps / found if found > 0 else math.inf)


def caveats(entries: Sequence[Entry]) -> list[str]:
    """Sentences on the optimizers of one task: first their budgets, then each one's own doubts."""
    budgets = [len(entry.tuning) for entry in entries]
    counts = ", ".join(f"{e.label} {n}" for e, n in zip(entries, budgets, strict=True))
    if len(set(budgets)) > 1:
        found = [f"Unequal tuning budgets, which favour the larger: {counts} runs."]
    else:
        found = [f"Equal tuning budgets: {budgets[0]} for each optimizer, in runs."]
    work = unlike_work([run.config for entry in entries for run in entry.tuning])
    found += [f"Not the same problem: {what}." for what in work]
    return found + [f"{entry.label}: {note}" for entry in entries for note in _caveats_of(entry)]


def data_caveats(sweep: Sweep) -> list[str]:
    """A sentence for each task whose runs were not all on the same data."""
    found = []
    for task, entries in sweep.tasks.items():
        names = [run.name for entry in entries for run in (*entry.tuning, *entry.seeds)]
        if what := unlike_data(sweep.rows, names):
            found.append(f"{task}: {what}; scores cannot be compared.")
    return found


def without_lost(entry: Entry) -> str:
    """What to say behind a mean that some seeds are not in."""
    return f" ({entry.lost} of {len(entry.seeds)} diverged)" if entry.lost else ""


def _caveats_of(entry: Entry) -> list[str]:
    best, found = entry.best, []
    runs = {run.name: run for run in (*entry.tuning, *entry.seeds)}.values()
    if edge := edge_of(entry):
        rate = f"{best.config.learning_rate:g}"
        found.append(f"its best rate, {rate}, is the {edge} tried; others may be better.")
    if len({run.config.learning_rate for run in entry.tuning}) == 1:
        found.append("one learning rate only; it was not tuned.")
    if best.score is None:
        found.append("no setting came to a score.")
    elif sum(run.score is not None for run in entry.seeds) == 1:
        found.append("a single seed; its spread is unknown.")
    if entry.lost:
        found.append(f"{entry.lost} of {len(entry.seeds)} seeds diverged at the best rate.")
    if waiting := sum(run.state == "waiting" for run in runs):
        found.append(f"{waiting} of {len(runs)} runs have not ended.")
    if errors := [run.error for run in runs if run.state == "failed"]:
        found.append(f"{len(errors)} of {len(runs)} runs failed, as with {errors[0]}.")
    return found
