"""How a metric went during runs, and when it came to AdamW's final value."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from celo2.evaluate.comparison import Entry, Sweep, metric_of, spread
from celo2.runs.records import Row

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
    goal, steps = spread(run.score for run in baseline.seeds), baseline.best.config.steps
    metric, higher = metric_of(sweep, entry)
    points = best_curve(sweep, entry, "valid", "metrics", metric)
    found = None if goal is None else steps_to_reach(points, goal.mean, higher)
    if found is None or steps is None:
        return None
    return Reached(found, steps / found if found > 0 else math.inf)
