"""Rows sent to TensorBoard or Weights & Biases; either is imported only when asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
            writer.add_scalar(name, value, row["iteration"])
        if row["kind"] == "end":
            writer.close()

    return send


def wandb(out: Path, config: dict[str, Any]) -> Tracker:
    """Sends rows to the project celo2, one run for each folder."""
    try:
        import wandb as client  # pyright: ignore[reportMissingImports]: an option, not an extra
    except ImportError as error:
        raise ImportError("--wandb needs wandb: pip install wandb") from error
    run = client.init(project="celo2", name=out.name, dir=str(out), config=config, resume="allow")

    def send(row: dict[str, Any]) -> None:
        if values := scalars(row):
            run.log(values, step=row["iteration"])
        if row["kind"] == "end":
            run.finish()

    return send


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a train or heldout row, `train/losses/mnist` and the like."""
    if row["kind"] not in ("train", "heldout"):
        return {}
    return {f"{row['kind']}/{name}": v for name, v in _flatten(row) if name != "iteration"}


def _flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _flatten(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append((prefix + name, float(value)))
    return found
