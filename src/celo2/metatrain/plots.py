"""A run's figures, drawn from its records and its rule alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from celo2 import rulefile
from celo2.metatrain.status import check_kind
from celo2.rule import FEATURES, Rule, RuleConfig
from celo2.runs import records
from celo2.runs.folder import RunFolder
from celo2.runs.records import Row

WINDOW = 0.02  # of the curve, over which it is smoothed
DPI = 150


def plot_run(run: str | Path, out: str | Path | None = None) -> list[Path]:
    """Draws `meta_loss.png`, `heldout.png` and `first_layer.png`, and returns the files.

    A figure without records is left out. They are in the run's folder by default.
    """
    run = Path(run)
    if not run.is_dir():
        raise FileNotFoundError(f"{run} is not a folder: give the --out of a meta-training run.")
    check_kind(RunFolder(run))
    rows = records.read(run / "records.jsonl")
    figures = {}
    if train := of_kind(rows, "train"):
        figures["meta_loss"] = draw_meta_loss(train)
    if heldout := of_kind(rows, "heldout"):
        figures["heldout"] = draw_heldout(heldout)
    if (run / "rule.safetensors").is_file():
        figures["first_layer"] = draw_first_layer(rulefile.load(run / "rule.safetensors"))
    if not figures:
        raise FileNotFoundError(f"{run} holds neither records.jsonl nor rule.safetensors to draw.")
    folder = run if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {folder / f"{name}.png": figure for name, figure in figures.items()}
    for path, figure in paths.items():
        figure.savefig(path, dpi=DPI)
    return list(paths)


def of_kind(rows: Sequence[Row], kind: str) -> list[Row]:
    """The rows of one kind; of an iteration that a resumed run has twice, the last one."""
    found = {row["iteration"]: row for row in rows if row.get("kind") == kind}
    return [found[iteration] for iteration in sorted(found)]


def draw_meta_loss(rows: Sequence[Row]) -> Figure:
    """The meta-loss by iteration, of all problems and of each dataset."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    iterations = _column(rows, "iteration")
    for name in _names(rows, "family_loss"):
        losses = _values([row["family_loss"].get(name) for row in rows])
        axes.plot(iterations, smooth(losses), label=name, linewidth=1.2)
    losses = _column(rows, "loss")
    axes.plot(iterations, losses, color="black", alpha=0.15, linewidth=0.8)
    axes.plot(iterations, smooth(losses), color="black", label="all problems", linewidth=2)
    axes.set(xlabel="outer iteration", ylabel="mean inner loss", title="Meta-loss")
    _add_grid(axes)
    return figure


def draw_heldout(rows: Sequence[Row]) -> Figure:
    """The held-out losses against AdamW's by iteration, each at its best learning rate."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    iterations = _column(rows, "iteration")
    for name in _names(rows, "problems"):
        ratios = _values([_ratio(row["problems"].get(name)) for row in rows])
        axes.plot(iterations, ratios, "o-", markersize=3, linewidth=1.2, label=name)
    mean = np.exp(_column(rows, "score"))
    axes.plot(iterations, mean, "o-", color="black", markersize=4, linewidth=2, label="mean")
    best = int(np.nanargmin(mean)) if np.isfinite(mean).any() else None
    if best is not None:
        label = f"best {mean[best]:.3f} at {iterations[best]:g}"
        axes.plot(iterations[best], mean[best], "*", color="crimson", markersize=13, label=label)
    axes.axhline(1, color="grey", linestyle="--", linewidth=1)
    axes.set_yscale("log")
    plain = FuncFormatter(lambda y, _: f"{y:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)
    axes.set(xlabel="outer iteration", ylabel="loss / AdamW's loss", title="Held-out problems")
    _add_grid(axes)
    return figure


def draw_first_layer(rule: Rule) -> Figure:
    """The MLP's first-layer weights by feature and hidden unit, and each feature's norm."""
    names, matrix = column_names(rule.config), np.asarray(rule.weights["w0"])
    figure = Figure(figsize=(9, 0.24 * len(names) + 1.2), layout="constrained")
    heat, bars = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    limit = max(float(np.abs(matrix).max()), 1e-12)
    image = heat.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    figure.colorbar(image, ax=heat, label="weight", location="left", pad=0.02, aspect=40)
    heat.set_yticks(range(len(names)), names, fontsize=8)
    heat.set_xticks(range(matrix.shape[1]))
    heat.set(xlabel="hidden unit", title="First-layer weights")
    bars.barh(range(len(names)), np.linalg.norm(matrix, axis=1), color="slategrey")
    bars.tick_params(axis="y", length=0)
    bars.grid(axis="x", alpha=0.3)
    bars.set(xlabel="over hidden units", title="Norm by feature")
    return figure


def column_names(config: RuleConfig) -> list[str]:
    """A name for each input column of the rule, with its decay where it has one.

    >>> column_names(RuleConfig())[2:5]
    ['parameter', 'momentum 0.9', 'momentum 0.99']
    """
    names = []
    for feature in FEATURES:
        momentum = feature.name.startswith("momentum")
        decays = config.momentum_decays if momentum else config.factored_decays
        labels = [f" {decay:g}" for decay in decays] if feature.per_decay else [""]
        names += [feature.name.replace("_", " ") + label for label in labels]
    return names


def smooth(values: np.ndarray, window: float = WINDOW) -> np.ndarray:
    """The mean over a window of neighbours, a fraction of the curve; NaN counts as absent."""
    half = int(window * len(values) / 2)
    present = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(present, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(present)])
    places = np.arange(len(values))
    low, high = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    counted = counts[high] - counts[low]
    return np.where(counted > 0, (sums[high] - sums[low]) / np.maximum(counted, 1), np.nan)


def _ratio(result: Row | None) -> float | None:
    return result["loss"] / result["adamw"] if result else None


def _names(rows: Sequence[Row], field: str) -> list[str]:
    return list({name: None for row in rows for name in row.get(field) or {}})


def _column(rows: Sequence[Row], field: str) -> np.ndarray:
    return _values([row.get(field) for row in rows])


def _values(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _add_grid(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, framealpha=0.9)
