"""The output of long commands: lines, a progress bar, TensorBoard, Weights & Biases.

Trackers are imported only when they are asked for.
"""

import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tyro

from celo2.rulefile import import_extra
from celo2.runs.records import Row

Flat = tyro.conf.arg(name="")  # --learning-rate, not --config.learning-rate
COUNTS = ("iteration", "step")
Tracker = Callable[[Row], None]


def say(text: str) -> None:
    """Prints a line of the command's own."""
    print(f"celo2: {text}", file=sys.stderr, flush=True)


def set_up_logging() -> None:
    """Logs celo2's messages as lines of the command, and none of orbax, which logs tracebacks."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("celo2: %(message)s"))
    ours = logging.getLogger("celo2")
    ours.handlers, ours.propagate = [handler], False
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def progress_bar(total: float | None, unit: str, done: int = 0, **options: Any) -> Any:
    """A bar on stderr, drawn every 30 seconds where that is not a terminal."""
    from tqdm import tqdm

    interval = 0.5 if sys.stderr.isatty() else 30
    options |= {"mininterval": interval, "dynamic_ncols": True}
    return tqdm(initial=done, total=total, unit=unit, **options)


def tensorboard(out: Path) -> Tracker:
    """Writes rows as scalars to RUN_DIR/tensorboard."""
    writer = import_extra("tensorboardX", "tensorboard").SummaryWriter(str(out / "tensorboard"))

    def send(row: Row) -> None:
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

    def send(row: Row) -> None:
        if values := scalars(row):
            run.log(values, step=_count(row))
        if row["kind"] == "end":
            run.finish()

    return send


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a train, valid or heldout row, `train/family_loss/mnist` and the like."""
    if row["kind"] not in ("train", "valid", "heldout"):
        return {}
    return {f"{row['kind']}/{name}": v for name, v in _flatten_numbers(row) if name not in COUNTS}


def tracked(
    rows: Iterable[Row],
    out: Path,
    config: dict[str, Any],
    *,
    to_tensorboard: bool,
    to_wandb: bool,
) -> Iterator[Row]:
    """The rows, each sent to the trackers, which start with the first row: a run may be refused."""
    send: list[Tracker] | None = None
    for row in rows:
        if send is None:
            send = [tensorboard(out)] if to_tensorboard else []
            send += [wandb(out, config)] if to_wandb else []
        for tracker in send:
            tracker(row)
        yield row


def _count(row: Row) -> int:
    """The progress of a run, in iterations of meta-training or in steps."""
    return next(row[name] for name in COUNTS if name in row)


def _flatten_numbers(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _flatten_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append((prefix + name, float(value)))
    return found
