"""A sweep's figures, drawn from its records alone."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from celo2.evaluate.comparison import (
    Entry,
    Point,
    Sweep,
    best_curve,
    metric_of,
    read_sweep,
    sensitivity,
)

# Of Okabe and Ito, which the colour-blind can tell apart; the markers help them too.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999")
MARKERS = "os^Dv<>P"
LINE_STYLES = {"hidden": "-", "other": "--"}
BINS = 120  # of a train curve: each point is the mean of as many rows as that takes
FOCUS = 0.1  # of a run, whose high losses would press the rest of it flat
LOG_RATIO = 10.0  # of the highest to the lowest score, from which their axis is logarithmic
TICKS = ((10.0, (1.0, 2.0, 3.0, 5.0)), (300.0, (1.0, 2.0, 5.0)), (math.inf, (1.0,)))
DPI = 150
LEGEND_WIDTH = 72  # letters in a row of a legend; a line or mark takes four

Draw = Callable[[Sweep, str], Figure]


def plot_sweep(folder: str | PathLike, out: str | PathLike | None = None) -> list[Path]:
    """Draws every task of a sweep as `TASK_FIGURE.png`, and gives the files.

    They are in the folder `figures` of the sweep's own, or beside its packed file, by default.
    """
    sweep = read_sweep(folder)
    home = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    target = home / "figures" if out is None else Path(out)
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for task in sweep.tasks:
        for name, draw in FIGURES.items():
            paths.append(target / f"{task}_{name}.png")
            FigureCanvasAgg(draw(sweep, task)).print_figure(paths[-1], dpi=DPI)
    return paths


def write_svg(figure: Figure, file) -> None:
    """Writes the figure as SVG with real text, and without the date: equal records, equal files."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "celo2"}):
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})


def draw_curves(sweep: Sweep, task: str) -> Figure:
    """The best setting of each optimizer: training as a line, validation as points."""
    entries = sweep.tasks[task]
    metric, higher = metric_of(entries[0])
    figure, axes = _new_figure(f"{metric} by step", "step", metric)
    seen: list[Point] = []
    for entry in entries:
        color, marker = _style(sweep, entry)
        train = thin(best_curve(entry, "train", "metrics", metric))
        valid = best_curve(entry, "valid", "metrics", metric)
        seen += train + valid
        axes.plot(*_columns(train), color=color, linewidth=1, alpha=0.55)
        axes.plot(*_columns(valid), marker, color=color, markersize=4)
        if train or valid:
            label = f"{_text(entry.label)} (rate {entry.best.config.learning_rate:g})"
            axes.plot([], [], f"{marker}-", color=color, markersize=4, label=label)
    _focus(axes, seen, higher)
    _add_legend(figure, axes)
    return figure


def draw_rates(sweep: Sweep, task: str) -> Figure:
    """The final score against the learning rate; rates that diverged are crosses on top."""
    entries = sweep.tasks[task]
    metric, _ = metric_of(entries[0])
    figure, axes = _new_figure(f"final validation {metric}", "learning rate", metric)
    rates, scores = [], []
    for entry in entries:
        color, marker = _style(sweep, entry)
        points = sensitivity(entry)
        good = [(rate, score) for rate, score in points if score is not None]
        bad = [rate for rate, score in points if score is None]
        rates += [rate for rate, _ in points]
        scores += [score for _, score in good]
        label = _text(entry.label)
        axes.plot(*_columns(good), f"{marker}-", color=color, markersize=5, label=label)
        # Its y is a fraction of the axes, since a run that diverged has no score.
        above = axes.get_xaxis_transform()
        axes.plot(bad, [0.96] * len(bad), "x", color=color, transform=above, markersize=8)
    if len(scores) < len(rates):
        axes.plot([], [], "x", color="black", label="diverged")
    axes.set_xscale("log")
    if rates:
        _plain(axes.xaxis, rates)
    if scores and min(scores) > 0 and max(scores) > LOG_RATIO * min(scores):
        axes.set_yscale("log")
        _plain(axes.yaxis, scores)
    _add_legend(figure, axes)
    return figure


def draw_rms(sweep: Sweep, task: str, *, field: str, title: str) -> Figure:
    """The RMS of updates, the learning rate in it, or of parameters, by step and group."""
    figure, axes = _new_figure(title, "step", "")
    drawn, values = set(), []
    for entry in sweep.tasks[task]:
        color, _ = _style(sweep, entry)
        curves = {group: best_curve(entry, "train", field, group) for group in LINE_STYLES}
        for group, points in curves.items():
            positive = [(step, value) for step, value in thin(points) if value > 0]
            if positive:
                drawn.add(group)
                values += [value for _, value in positive]
                axes.plot(*_columns(positive), LINE_STYLES[group], color=color, linewidth=1.4)
        if any(curves.values()):
            axes.plot([], [], color=color, label=_text(entry.label))
    for group in LINE_STYLES:
        if group in drawn:
            axes.plot([], [], LINE_STYLES[group], color="grey", label=group)
    if values:
        axes.set_yscale("log")
    if values and max(values) < LOG_RATIO * min(values):
        # Matplotlib's own labels are long where there is no whole decade.
        _plain(axes.yaxis, values)
    _add_legend(figure, axes)
    return figure


FIGURES: dict[str, Draw] = {
    "curves": draw_curves,
    "rates": draw_rates,
    "update_rms": partial(draw_rms, field="update_rms", title="RMS of updates"),
    "param_rms": partial(draw_rms, field="param_rms", title="RMS of parameters"),
}


def thin(points: Sequence[Point], bins: int = BINS) -> list[Point]:
    """At most `bins` points, each the mean of neighbours: smoother, and smaller as a file.

    >>> thin([(1, 4.0), (2, 2.0), (3, 3.0), (4, 5.0)], bins=2)
    [(1.5, 3.0), (3.5, 4.0)]
    """
    if len(points) <= bins:
        return list(points)
    parts = np.array_split(np.array(points, np.float64), bins)
    return [(float(step), float(value)) for step, value in (part.mean(axis=0) for part in parts)]


def _style(sweep: Sweep, entry: Entry) -> tuple[str, str]:
    """Colour and marker; an optimizer has the same on every task."""
    labels = list(dict.fromkeys(e.label for entries in sweep.tasks.values() for e in entries))
    place = labels.index(entry.label)
    return COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)]


def _new_figure(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.set_title(_text(title), fontsize=11)
    axes.set_xlabel(_text(x))
    axes.set_ylabel(_text(y))
    return figure, axes


def _focus(axes: Axes, points: Sequence[Point], higher: bool) -> None:
    """Sets the limits by what comes after the first part of the run."""
    last = max((step for step, _ in points), default=0)
    shown = [value for step, value in points if step >= FOCUS * last]
    if higher or not shown or min(shown) == max(shown):
        return
    margin = 0.05 * (max(shown) - min(shown))
    axes.set_ylim(min(shown) - margin, max(shown) + margin)


def _plain(axis: Axis, values: Sequence[float]) -> None:
    """Ticks of a logarithmic axis as plain numbers, in each decade as many as fit."""
    ratio = max(values) / min(values)
    subs = next(subs for most, subs in TICKS if ratio < most)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _add_legend(figure: Figure, axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if labels := axes.get_legend_handles_labels()[1]:
        columns = max(1, min(3, LEGEND_WIDTH // (max(map(len, labels)) + 4)))
        figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    else:
        axes.text(0.5, 0.5, "nothing recorded", ha="center", transform=axes.transAxes)


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _text(text: str) -> str:
    """As Matplotlib shows it word for word: no formulas, and no leading underscore, which hides."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
