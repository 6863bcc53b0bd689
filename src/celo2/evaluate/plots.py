"""A sweep's figures, drawn from its records alone."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from celo2.evaluate.comparison import (
    Interval,
    Point,
    Sweep,
    baseline_of,
    best_curve,
    bootstrap,
    interquartile_mean,
    metric_of,
    read_sweep,
    sensitivity,
)

# The palette of Okabe and Ito, which is safe for colour-blind readers, as are the markers.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999")
MARKERS = "os^Dv<>P"
LINE_STYLES = {"hidden": "-", "other": "--"}
BINS = 120  # points of a train curve, each a mean of neighbouring rows
FOCUS = 0.1  # the part of a run whose high losses do not count for the y limits
LOG_RATIO = 10.0  # of the highest to the lowest score, above which their axis is logarithmic
TICKS = ((10.0, (1.0, 2.0, 3.0, 5.0)), (300.0, (1.0, 2.0, 5.0)), (math.inf, (1.0,)))
DPI = 150
LEGEND_WIDTH = 72  # letters in a row of a legend; a line or mark takes four
COLUMNS = 3  # of panels
LEAST_SEEDS = 3  # of an optimizer, for an interval to mean something
# What may vary in a sweep: a field of RunConfig, and the positions of its values on an axis. Decays
# and seeds are evenly spaced.
SETTINGS: dict[str, tuple[str, Callable[..., np.ndarray]]] = {
    "rate": ("learning_rate", np.log),
    "decay": ("weight_decay", lambda known: np.arange(len(known))),
    "seed": ("seed", lambda known: np.arange(len(known))),
}

Draw = Callable[[Sweep, str], Figure]


def plot_sweep(folder: str | PathLike, out: str | PathLike | None = None) -> list[Path]:
    """Draws every task of a sweep as `TASK_FIGURE.png`, and returns the files.

    Tasks whose names differ in a number, such as widths, also have a figure together, and so have
    all tasks if there are several seeds. By default the files are in `figures` in the sweep's
    folder, or beside its packed file.
    """
    sweep = read_sweep(folder)
    home = Path(folder) if Path(folder).is_dir() else Path(folder).parent
    target = home / "figures" if out is None else Path(out)
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in _figures(sweep):
        paths.append(target / f"{name}.png")
        figure.savefig(paths[-1], dpi=DPI)
    return paths


def _figures(sweep: Sweep) -> Iterator[tuple[str, Figure]]:
    for task in sweep.tasks:
        for name, draw in FIGURES.items():
            yield f"{task}_{name}", draw(sweep, task)
    for tasks in sizes_of(sweep):
        start = os.path.commonprefix(tasks).rstrip("-.0123456789")
        yield f"{start}_sizes", draw_sizes(sweep, tasks)
    if any(
        len(entry.scores) >= LEAST_SEEDS for entries in sweep.tasks.values() for entry in entries
    ):
        yield "intervals", draw_intervals(sweep)


def write_svg(figure: Figure, file) -> None:
    """Writes the figure as SVG with text as text and no date: equal records make equal files."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "celo2"}):
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})


def draw_curves(sweep: Sweep, task: str) -> Figure:
    """The best setting of each optimizer: training as a line, validation as points."""
    entries = sweep.tasks[task]
    metric, higher = metric_of(entries[0])
    figure, axes = _new_figure(f"{metric} by step", "step", metric)
    seen: list[Point] = []
    for entry in entries:
        color, marker = _style(sweep, entry.label)
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
        color, marker = _style(sweep, entry.label)
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
    if _spans_decades(scores):
        axes.set_yscale("log")
        _plain(axes.yaxis, scores)
    _add_legend(figure, axes)
    return figure


def draw_rms(sweep: Sweep, task: str, *, field: str, title: str) -> Figure:
    """The RMS of updates, the learning rate in it, or of parameters, by step and group."""
    figure, axes = _new_figure(title, "step", "")
    drawn, values = set(), []
    for entry in sweep.tasks[task]:
        color, _ = _style(sweep, entry.label)
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


def draw_settings(sweep: Sweep, task: str) -> Figure:
    """Parallel coordinates: each run as a line through its rate, decay, seed and final score.

    A setting that is equal in all runs has no axis. The darker a line, the better its score;
    dashed ones diverged, and end above the others.
    """
    entries = sweep.tasks[task]
    metric, higher = metric_of(entries[0])
    runs = [run for entry in entries for run in entry.runs if run.end is not None]
    scales = {
        name: _heights([getattr(run.config, field) for run in runs], place)
        for name, (field, place) in SETTINGS.items()
    }
    scales = {name: heights for name, heights in scales.items() if len(heights) > 1}
    scores = [run.score for run in runs if run.score is not None]
    ends = _heights(scores or [0.0], np.log if _spans_decades(scores) else np.asarray)
    figure, panels = _panels([entry.label for entry in entries])
    for axes, entry in zip(panels, entries, strict=True):
        for run in (run for run in runs if run.config.label == entry.label):
            places = [
                heights[getattr(run.config, SETTINGS[name][0])] for name, heights in scales.items()
            ]
            end = 1.08 if run.score is None else ends[run.score]
            dark = 0.0 if run.score is None else end if higher else 1 - end
            axes.plot(
                [*places, end],
                "--" if run.score is None else "-",
                color=matplotlib.colormaps["viridis_r"](dark),
                linewidth=1 + dark,
                alpha=0.8,
                zorder=2 + dark,
            )
        _add_scales(axes, scales | {metric: ends})
    return figure


def _heights(values: Sequence[float], place: Callable[..., np.ndarray]) -> dict[float, float]:
    """The height of each value on an axis from 0 to 1; `place` is its position on any scale."""
    known = sorted(set(values))
    places = place(known)
    span = float(places[-1] - places[0]) if known else 0.0
    return {v: (p - places[0]) / span if span else 0.5 for v, p in zip(known, places, strict=True)}


def _add_scales(axes: Axes, scales: Mapping[str, Mapping[float, float]]) -> None:
    for x, heights in enumerate(scales.values()):
        axes.axvline(x, color="grey", linewidth=0.8, zorder=1)
        side = "left" if x == len(scales) - 1 else "right"
        known = list(heights)
        for value in known if len(known) <= 8 else (known[0], known[-1]):
            text = f" {value:.3g} "
            axes.text(x, heights[value], text, ha=side, va="center", fontsize=7)
    axes.set_xticks(range(len(scales)), [_text(name) for name in scales])
    axes.set_yticks([])
    axes.set_ylim(-0.05, 1.12)
    axes.set_xlim(-0.5, len(scales) - 0.5)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def sizes_of(sweep: Sweep) -> list[list[str]]:
    """Groups of tasks whose names differ in a number only, sorted by it."""
    groups: dict[str, list[str]] = {}
    for task in sweep.tasks:
        groups.setdefault(re.sub(r"\d+(\.\d+)?", "#", task), []).append(task)
    return [sorted(tasks, key=_numbers_in) for tasks in groups.values() if len(tasks) > 1]


def _numbers_in(task: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", task)]


def draw_sizes(sweep: Sweep, tasks: Sequence[str]) -> Figure:
    """The final score against the learning rate, one line for each size, the best marked."""
    labels = list(dict.fromkeys(entry.label for task in tasks for entry in sweep.tasks[task]))
    metric, higher = metric_of(sweep.tasks[tasks[0]][0])
    figure, panels = _panels(labels)
    shades = matplotlib.colormaps["viridis"](np.linspace(0.9, 0, len(tasks)))
    for axes, label in zip(panels, labels, strict=True):
        rates = []
        for task, shade in zip(tasks, shades, strict=True):
            entry = next((entry for entry in sweep.tasks[task] if entry.label == label), None)
            found = [] if entry is None else sensitivity(entry)
            points = [(rate, score) for rate, score in found if score is not None]
            rates += [rate for rate, _ in points]
            axes.plot(*_columns(points), "o-", color=shade, markersize=3, label=_text(task))
            if points:
                best = (max if higher else min)(points, key=lambda point: point[1])
                axes.plot(*best, "*", color=shade, markersize=11)
        axes.set_xscale("log")
        if rates:
            _plain(axes.xaxis, rates)
        axes.set_xlabel("learning rate")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.sharey(panels[0])
    panels[0].set_ylabel(_text(metric))
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def draw_intervals(sweep: Sweep) -> Figure:
    """The mean score of each optimizer's seeds on each task, with bootstrap intervals.

    A last panel has the interquartile mean over all tasks of the scores over AdamW's mean, where
    all have several seeds.
    """
    panels_of = {
        f"{task}, {metric_of(entries[0])[0]}": {
            entry.label: bootstrap([entry.scores]) for entry in entries if entry.scores
        }
        for task, entries in sweep.tasks.items()
    }
    if together := _aggregate(sweep):
        panels_of["all tasks, IQM over AdamW's mean"] = together
    figure, panels = _panels(list(panels_of))
    for axes, found in zip(panels, panels_of.values(), strict=True):
        for place, (label, interval) in enumerate(reversed(found.items())):
            color, marker = _style(sweep, label)
            ends = [interval.low, interval.high]
            axes.plot(ends, [place, place], color=color, linewidth=5, alpha=0.4)
            axes.plot(interval.value, place, marker, color=color)
        axes.set_yticks(range(len(found)), [_text(label) for label in reversed(found)], fontsize=8)
        axes.set_ylim(-0.6, len(found) - 0.4)
        axes.grid(alpha=0.3, axis="x")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _aggregate(sweep: Sweep) -> dict[str, Interval]:
    """The interval of each label over all tasks; empty unless every task has all labels."""
    strata: dict[str, list[list[float]]] = {}
    for entries in sweep.tasks.values():
        baseline = baseline_of(entries)
        if baseline is None:
            return {}
        unit = float(np.mean(baseline.scores))
        for entry in entries:
            strata.setdefault(entry.label, []).append([x / unit for x in entry.scores])
    enough = all(len(seeds) >= LEAST_SEEDS for found in strata.values() for seeds in found)
    if len(sweep.tasks) < 2 or not enough or len({len(found) for found in strata.values()}) > 1:
        return {}
    return {label: bootstrap(found, interquartile_mean) for label, found in strata.items()}


FIGURES: dict[str, Draw] = {
    "curves": draw_curves,
    "rates": draw_rates,
    "settings": draw_settings,
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


def _style(sweep: Sweep, label: str) -> tuple[str, str]:
    """Colour and marker; an optimizer has the same on every task."""
    labels = list(dict.fromkeys(e.label for entries in sweep.tasks.values() for e in entries))
    place = labels.index(label)
    return COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)]


def _new_figure(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.set_title(_text(title), fontsize=11)
    axes.set_xlabel(_text(x))
    axes.set_ylabel(_text(y))
    return figure, axes


def _spans_decades(scores: Sequence[float]) -> bool:
    """Whether their axis should be logarithmic."""
    return bool(scores) and min(scores) > 0 and max(scores) > LOG_RATIO * min(scores)


def _panels(titles: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, in rows."""
    columns = min(COLUMNS, len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(1 + 3 * columns, 0.4 + 2.6 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[len(titles) :]:
        axes.remove()
    for axes, title in zip(panels, titles, strict=False):
        axes.set_title(_text(title), fontsize=10)
    return figure, panels[: len(titles)]


def _focus(axes: Axes, points: Sequence[Point], higher: bool) -> None:
    """Sets the y limits from the points after the first part of the run."""
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
    """The text escaped for Matplotlib: no formulas, no leading underscore, which hides a label."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
