"""Whether runs of one task may be compared: the same tries, the same work, the same data."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from celo2.evaluate.config import RunConfig
from celo2.runs.records import Row

# Another value of these makes another problem; schedules and the like are an optimizer's own.
WORK = ("steps", "batch", "evaluation_batches", "text", "precision")


def count_runs(configs: Iterable[RunConfig]) -> dict[str, int]:
    """The number of runs, by label."""
    counts: dict[str, int] = {}
    for config in configs:
        counts[str(config.label)] = counts.get(str(config.label), 0) + 1
    return counts


def unlike_work(configs: Sequence[RunConfig]) -> list[str]:
    """For every field that makes another problem and differs, who has which value.

    >>> unlike_work([RunConfig("a", label="x", steps=1), RunConfig("a", label="y", steps=2)])
    ['steps differ (x 1, y 2)']
    """
    values = {name: [(str(c.label), getattr(c, name)) for c in configs] for name in WORK}
    return [f"{name} differ ({_list(found)})" for name, found in values.items() if _differ(found)]


def unlike_data(rows: Mapping[str, Sequence[Row]], names: Iterable[str]) -> str | None:
    """Who was trained on which data, if these runs were not all on the same; else None."""
    starts = [row for name in names for row in rows.get(name, ()) if row.get("kind") == "start"]
    found = [(row["config"]["label"], str(row.get("data"))[:8]) for row in starts]
    return f"data differ (SHA-256 {_list(found)})" if _differ(found) else None


def _differ(found: Sequence[tuple[str, Any]]) -> bool:
    return len({value for _, value in found}) > 1


def _list(found: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(f"{label} {value}" for label, value in dict.fromkeys(found))
