"""The records of a run: a file of JSON lines, one for each row."""

import json
import math
import os
from pathlib import Path
from typing import Any

from celo2.rulefile import write_whole

Row = dict[str, Any]


def read(path: str | Path) -> list[Row]:
    """All rows of a file; none if there is no such file.

    A line that is not a JSON object is skipped: its writer was killed, or the disk was full.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [row for line in lines if isinstance(row := _parse(line), dict)]


def append(path: str | Path, row: Row) -> None:
    """Appends a row in one write, so that a reader sees at most the last line incomplete.

    Raises an OSError if the disk is full.
    """
    with open(path, "ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        torn = end > 0 and file.read(1) != b"\n"
        rest = memoryview(b"\n" * torn + _line(row))
        while rest:
            rest = rest[file.write(rest) or 0 :]


def cut(path: str | Path, last: int, count: str = "iteration") -> None:
    """Drops incomplete lines and the rows whose `count` is above `last`."""
    path = Path(path)
    kept = b"".join(_line(row) for row in read(path) if row.get(count, 0) <= last)
    if path.exists() and path.read_bytes() != kept:
        write_whole(path, kept)


def clean(value: Any) -> Any:
    """The value as JSON can hold it: NaN and infinities become None, tuples lists."""
    if isinstance(value, dict):
        return {str(key): clean(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shorten(numbers: Any) -> Any:
    """A number, or all numbers in a dict, rounded to six digits."""
    if isinstance(numbers, dict):
        return {name: shorten(value) for name, value in numbers.items()}
    return float(f"{float(numbers):.6g}")


def _line(row: Row) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
