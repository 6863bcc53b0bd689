"""A sweep as one file of JSON lines: its index, then the records of every run that has ended.

It can be kept with a project, reported and plotted as the sweep's folder can, and its runs need not
be made again where the same recipe is swept. Of a run's train rows, which are most of a sweep and
serve only to draw curves, it keeps sixteen.
"""

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from celo2.rulefile import write_whole
from celo2.runs import records
from celo2.runs.records import Row

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
