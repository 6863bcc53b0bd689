"""Rows sent to TensorBoard or Weights & Biases; either is imported only when asked for."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

COUNTS = ("iteration", "step")
Tracker = Callable[[dict[str, Any]], None]


def tensorboard(out: Path) -> Tracker:
    """Writes rows as scalars to RUN_DIR/tensorboard."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "--tensorboard needs tensorboardX: pip install 'celo2[tensorboard]'"
        ) from error
    writer = SummaryWriter(str(out / "tensorboard"))

    def send(row: dict[str, Any]) -> None:
        for name, value in scalars(row).items():
            writer.add_scalar(name, value, _count(row))
        if row["kind"] == "end":
            writer.close()

    return send


def wandb(out: Path, config: dict[str, Any]) -> Tracker:
    """Sends rows to the project celo2, one run for each folder."""
    try:
        import wandb as client  # pyright: ignore[reportMissingImports]: an option, not an extra
    except ImportError as error:
        raise ImportError("--wandb needs wandb: pip install wandb") from error
    number = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16]  # for the next resume
    run = client.init(
        project="celo2", name=out.name, id=number, dir=str(out), config=config, resume="allow"
    )

    def send(row: dict[str, Any]) -> None:
        if values := scalars(row):
            run.log(values, step=_count(row))
        if row["kind"] == "end":
            run.finish()

    return send


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a train, valid or heldout row, `train/family_loss/mnist` and the like."""
    if row["kind"] not in ("train", "valid", "heldout"):
        return {}
    return {f"{row['kind']}/{name}": v for name, v in _flatten(row) if name not in COUNTS}


def tracked(
    rows: Iterable[dict[str, Any]],
    out: Path,
    config: dict[str, Any],
    *,
    to_tensorboard: bool,
    to_wandb: bool,
) -> Iterator[dict[str, Any]]:
    """The rows, each sent on first; trackers start with the first row, as a run may be refused."""
    send: list[Tracker] | None = None
    for row in rows:
        if send is None:
            send = [tensorboard(out)] if to_tensorboard else []
            send += [wandb(out, config)] if to_wandb else []
        for tracker in send:
            tracker(row)
        yield row


def _count(row: dict[str, Any]) -> int:
    """How far a run is: in iterations of meta-training, or in steps."""
    return next(row[name] for name in COUNTS if name in row)


def _flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _flatten(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append((prefix + name, float(value)))
    return found
