"""The status of a run, read from its folder, which is not changed."""

from os import PathLike
from pathlib import Path
from typing import Any

from celo2.metatrain.loop import best_row
from celo2.runs import checkpoint, records
from celo2.runs.folder import RunFolder, is_alive, read_owner
from celo2.runs.records import Row

RECENT = 50  # rows


def status(out: str | PathLike) -> dict[str, Any]:
    """The progress and losses of a run, and the digest of its newest whole checkpoint.

    Equal digests mean equal runs: a digest covers the state's arrays, the config and the data.
    """
    folder = RunFolder(Path(out))
    stored = folder.read_config()
    if stored is None:
        raise FileNotFoundError(f"{folder.path} holds no run: it has no {folder.config.name}.")
    check_kind(folder)
    rows = records.read(folder.records)
    alive = is_alive(folder)
    found, damages = checkpoint.read_newest(folder.checkpoints)
    train = _newest_row(rows, "train")
    saved = None if found is None else found.iteration
    return {
        "run": str(folder.path),
        "state": _state(alive, stored, rows, saved),
        "process": read_owner(folder) if alive else None,
        "iteration": max(train.get("iteration", 0), saved or 0),
        "iterations": stored["config"]["iterations"],
        "loss": train.get("loss"),
        "family_loss": train.get("family_loss", {}),
        "elapsed": train.get("elapsed", 0.0),
        "seconds_left": _seconds_left(stored, rows),
        "inner_steps_per_second": train.get("inner_steps_per_second"),
        "checkpoint": saved,
        "checkpoints": checkpoint.list_iterations(folder.checkpoints),
        "damaged": {str(damage.iteration): damage.cause for damage in damages},
        "digest": None if found is None else found.meta["digest"],
        "best": best_row(rows),
        "warnings": [row for row in rows if row.get("kind") == "warning"],
        "data": stored["data"],
        "version": stored["version"],
    }


def check_kind(folder: RunFolder) -> None:
    """Raises a ValueError where the folder holds a run of another command."""
    stored = folder.read_config()
    if stored is not None and "iterations" not in stored.get("config", {}):
        raise ValueError(
            f"{folder.path} is a folder of `celo2 run`, not of `celo2 meta-train`: its rows are "
            f"in {folder.records.name}, `celo2 run … --resume` continues it, and `celo2 plot` "
            "and `celo2 report` show the folder of a whole `celo2 sweep`."
        )


def _newest_row(rows: list[Row], kind: str) -> Row:
    return next((row for row in reversed(rows) if row.get("kind") == kind), {})


def _state(alive: bool, stored: dict[str, Any], rows: list[Row], saved: int | None) -> str:
    if alive:
        return "running"
    if _newest_row(rows, "end").get("reason") == "diverged":
        return "diverged"
    finished = saved is not None and saved >= stored["config"]["iterations"]
    return "finished" if finished else "stopped"


def _seconds_left(stored: dict[str, Any], rows: list[Row]) -> float | None:
    """An estimate from the newest rows of one process; None if there are too few."""
    total = stored["config"]["iterations"]
    if _newest_row(rows, "train").get("iteration", 0) >= total:
        return 0.0
    since = max((i for i, row in enumerate(rows) if row.get("kind") == "start"), default=0)
    train = [row for row in rows[since:] if row.get("kind") == "train"][-RECENT:]
    if len(train) < 2:
        return None
    pace = (train[-1]["elapsed"] - train[0]["elapsed"]) / (
        train[-1]["iteration"] - train[0]["iteration"]
    )
    return round(pace * (total - train[-1]["iteration"]), 1)
