"""Writes the tables and figures of widths, decays, long runs, sizes and ablations from the records.

python benchmarks/experiments.py
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from results import DOCS, NAMES, fill, in_order, log_ratio, markdown, mean_score, show_rate

from celo2.evaluate.comparison import (
    Entry,
    Outcome,
    Sweep,
    best_curve,
    curve,
    read_sweep,
    sensitivity,
)
from celo2.evaluate.plots import COLORS, MARKERS, draw_settings, draw_sizes, thin

FIGURES = DOCS / "figures"
RECORDS = DOCS / "results"
DPI = 150
LABELS = NAMES | {
    "celo2-spectral": 'Celo2, `scale="spectral"`',
    "celo2-rms0.2": "Celo2, RMS×0.2",
    "celo2-three-momenta": "Celo2, three momenta",
}
TEXTS = {"wikipedia_en": "Wikipedia", "tinyshakespeare": "Shakespeare, 2.5 times"}
MODELS = {"lm-0.8m": "language model, 0.85M", "vit-tiny-cifar10": "ViT, CIFAR-10"}


class Study(NamedTuple):
    """One of the paper's tables: our labels, its names for them, and its losses."""

    title: str
    paper: dict[str, tuple[str, float | None]]


# The paper's losses are of LM-30M; those of Figure 4 are curves without numbers.
STUDIES = {
    "hidden": Study(
        "hidden size (Table 1a)",
        {
            "hidden 4": ("4", 4.128),
            "base": ("8", 3.812),
            "hidden 16": ("16", 3.857),
            "hidden 32": ("32", 3.869),
        },
    ),
    "decay of the RMS": Study(
        "RMS decay (Table 1b)",
        {
            "rms decay 0.9": ("0.9", 3.922),
            "base": ("0.95", 3.812),
            "rms decay 0.99": ("0.99", 3.865),
            "rms decay 0.999": ("0.999", 3.893),
        },
    ),
    "augmentation": Study(
        "augmentation (Table 1c)",
        {
            "augmentation none": ("none", 4.417),
            "base": ("global", 3.812),
            "augmentation tensor": ("tensor", None),
            "augmentation parameter": ("parameter", None),
        },
    ),
    "output norm": Study(
        "output norm (Table 1d)",
        {
            "norm raw": ("never", 3.961),
            "norm at test": ("at test", 3.992),
            "base": ("always", 3.812),
        },
    ),
    "form": Study(
        "form (Table 1e)",
        {
            "base": ("d", 3.812),
            "form d_exp_m": ("d·exp(m)", 3.900),
            "form d_exp_m_avg": ("d·exp(mean m)", 4.075),
        },
    ),
    "norms": Study(
        "norms (Table 2)",
        {
            "norm raw": ("raw", 3.961),
            "norm rolling_norm": ("rolling norm", 3.860),
            "norm rolling_norm_clip": ("rolling norm clip", 3.999),
            "norm norm_clip": ("norm clip", 4.084),
            "base": ("norm", 3.812),
        },
    ),
    "harness": Study(
        "orthogonalization and Adam (Figure 4)",
        {
            "base": ("neither", None),
            "orthogonal at test": ("orthogonal, at test", None),
            "adam at test": ("Adam, at test", None),
            "both at test": ("both, at test", None),
            "orthogonal": ("orthogonal", None),
            "adam": ("Adam", None),
            "both": ("both", None),
        },
    ),
}
# The usual rule: before its meta-training, and after three of them.
USUAL = {
    "start": "its start, untrained",
    "base": "seed 0, in every table",
    "base, seed 1": "seed 1",
    "base, seed 2": "seed 2",
}


def main() -> None:
    """Writes every page and figure."""
    for path, page in pages().items():
        path.write_text(page, "utf-8")
        print(path)
    for path, figure in figures().items():
        figure.savefig(path, dpi=DPI)
        print(path)


def pages() -> dict[Path, str]:
    """Every page with tables of experiments, as it should be."""
    filled = {}
    for path, blocks in texts().items():
        page = path.read_text("utf-8")
        for name, text in blocks.items():
            page = fill(page, name, text, path)
        filled[path] = page
    return filled


def texts() -> dict[Path, dict[str, str]]:
    """The blocks of each page, where their records are there."""
    found = {}
    if widths := read("widths"):
        found[DOCS / "learning-rate.md"] = {"widths": width_table(widths)}
    if decay := read("decay"):
        found[DOCS / "weight-decay.md"] = {
            f"decay {task}": decay_table(decay.tasks[task]) for task in decay.tasks
        }
    if long := read("long"):
        found[DOCS / "long-runs.md"] = {"long": long_table(long)}
    if seeds := read("long-seeds"):
        found.setdefault(DOCS / "long-runs.md", {})["long seeds"] = seeds_table(seeds)
    if sizes := read("sizes"):
        found[DOCS / "sizes.md"] = {"sizes": size_table(sizes)}
    if ablations := read("ablations"):
        entries = by_label(ablations)
        found[DOCS / "ablations.md"] = {
            **{name: study_table(study, entries) for name, study in STUDIES.items()},
            "chance": chance_table(entries),
        }
    return found


def figures() -> dict[Path, Figure]:
    """Every figure of experiments, where their records are there."""
    found = {}
    if widths := read("widths"):
        found[FIGURES / "widths.png"] = draw_sizes(widths, list(widths.tasks))
    if decay := read("decay"):
        found[FIGURES / "decay.png"] = draw_decays(decay)
        found[FIGURES / "decay-runs.png"] = draw_settings(decay, "lm-0.8m")
    if long := read("long"):
        found[FIGURES / "long.png"] = draw_long(long)
    if sizes := read("sizes"):
        found[FIGURES / "sizes.png"] = draw_leads(sizes)
    if ablations := read("ablations"):
        found[FIGURES / "ablations.png"] = draw_studies(by_label(ablations))
    return found


def read(name: str) -> Sweep | None:
    """The packed sweep of that name, if there is one."""
    path = RECORDS / f"{name}.jsonl"
    return read_sweep(path) if path.exists() else None


def by_label(sweep: Sweep) -> dict[str, Entry]:
    (entries,) = sweep.tasks.values()
    return {entry.label: entry for entry in entries}


def loss_of(score: float | None) -> str:
    return "diverged" if score is None else f"{score:.3f}"


def bold_lowest(scores: Sequence[float | None]) -> list[str]:
    """The scores, the lowest in bold."""
    lowest = min((score for score in scores if score is not None), default=None)
    return [f"**{loss_of(s)}**" if s is not None and s == lowest else loss_of(s) for s in scores]


def width_table(sweep: Sweep) -> str:
    """The final loss by rate, a row for each scale and width."""
    rows, header = [], []
    labels = dict.fromkeys(entry.label for entries in sweep.tasks.values() for entry in entries)
    for label in labels:
        for task, entries in sweep.tasks.items():
            for entry in (entry for entry in entries if entry.label == label):
                points = sensitivity(entry)
                header = header or [show_rate(rate) for rate, _ in points]
                cells = bold_lowest([score for _, score in points])
                width = task.rpartition("-")[2]
                rows.append([LABELS[label], width, *cells, show_lowest(points)])
    return markdown(["", "width", *header, "lowest at"], rows)


def show_lowest(points: Sequence[tuple[float, float | None]]) -> str:
    """The rate where a parabola through the lowest loss and its neighbours is lowest."""
    rates = np.log([rate for rate, _ in points])
    losses = np.array([math.inf if loss is None else loss for _, loss in points])
    best = int(np.argmin(losses))
    near = slice(best - 1, best + 2)
    if not 0 < best < len(points) - 1 or not np.isfinite(losses[near]).all():
        return f"{show_rate(points[best][0])}, the {'lowest' if best == 0 else 'highest'} tried"
    square, slope, _ = np.polyfit(rates[near], losses[near], 2)
    return show_rate(float(f"{math.exp(-slope / (2 * square)):.1e}"))


def decay_table(entries: Iterable[Entry]) -> str:
    """The final loss of each optimizer by weight decay, each at the best of its rates."""
    rows, decays = [], []
    for entry in in_order(list(entries)):
        best = best_by_decay(entry)
        decays = list(best)
        cells = bold_lowest([run.score for run in best.values()])
        at = [show_rate(run.config.learning_rate) for run in best.values()]
        shown = [f"{cell} ({rate})" for cell, rate in zip(cells, at, strict=True)]
        rows.append([LABELS[entry.label], *shown])
    return markdown(["", *(f"{decay:g}" for decay in decays)], rows)


def best_by_decay(entry: Entry) -> dict[float, Outcome]:
    """The run with the lowest loss at each weight decay."""
    best: dict[float, Outcome] = {}
    for run in entry.tuning:
        decay = run.config.weight_decay
        if decay not in best or loss_or_inf(run) < loss_or_inf(best[decay]):
            best[decay] = run
    return dict(sorted(best.items()))


def loss_or_inf(run: Outcome) -> float:
    """The final loss; infinite where the run diverged."""
    return math.inf if run.score is None else run.score


def long_table(sweep: Sweep) -> str:
    """Loss, size of updates and weights of every run, by the end of the schedule."""
    rows = []
    for entries in sweep.tasks.values():
        for entry in in_order(entries):
            for run in sorted(entry.tuning, key=lambda run: run.config.learning_rate):
                end = "falls to zero" if run.config.schedule == "cosine" else "stays"
                updates = dict(curve(run.rows, "train", "update_rms", "hidden"))
                weights = dict(curve(run.rows, "train", "param_rms", "hidden"))
                cells = [end, LABELS[entry.label], show_rate(run.config.learning_rate)]
                cells += [loss_of(run.score), f"{max(updates.values()):.2g}"]
                rows.append([*cells, f"{weights[max(weights)]:.2f}"])
    header = ["the rate", "optimizer", "highest rate", "final validation loss"]
    return markdown([*header, "RMS of updates, at most", "RMS of weights, at the end"], rows)


def seeds_table(sweep: Sweep) -> str:
    """Mean losses of each text over seeds, and the log ratios of Celo2's to the others'."""
    labels = ("muon", "celo2", "celo2-three-momenta")
    rows = []
    for task, found in sweep.tasks.items():
        entries = {entry.label: entry for entry in found}
        means = [loss_of(mean_score(entries[label].seeds)) for label in labels]
        rates = [show_rate(entries[label].best.config.learning_rate) for label in labels]
        shown = [f"{mean} ({rate})" for mean, rate in zip(means, rates, strict=True)]
        ours = {task: entries["celo2"]}
        ratios = [log_ratio(ours, {task: entries[label]}) for label in (labels[0], labels[2])]
        rows.append([TEXTS[str(entries["celo2"].best.config.text)], *shown, *ratios])
    header = ["text", *map(LABELS.__getitem__, labels)]
    return markdown([*header, "Celo2 to Muon, %", "to three momenta, %"], rows)


def size_table(sweep: Sweep) -> str:
    """The final loss of each optimizer by size, and the log ratio of Celo2's to the others'."""
    rows = []
    for task, entries in sweep.tasks.items():
        found = {entry.label: entry for entry in in_order(entries)}
        cells = bold_lowest([entry.best.score for entry in found.values()])
        rates = [show_rate(entry.best.config.learning_rate) for entry in found.values()]
        shown = [f"{cell} ({rate})" for cell, rate in zip(cells, rates, strict=True)]
        leads = [lead_over(found["celo2"], found[other]) for other in ("adamw", "muon")]
        rows.append([size_of(task), *shown, *(f"{lead:+.1f}" for lead in leads)])
    names = [LABELS[label] for label in found]
    return markdown(["parameters", *names, "Celo2 to AdamW, %", "to Muon, %"], rows)


def size_of(task: str) -> str:
    return task.removeprefix("lm-").upper()


def lead_over(entry: Entry, other: Entry) -> float:
    """The log ratio of the final losses of two optimizers' best runs, in percent."""
    return 100 * math.log(loss_or_inf(entry.best) / loss_or_inf(other.best))


def study_table(study: Study, entries: dict[str, Entry]) -> str:
    """The variants of one of the paper's tables, ours beside its losses."""
    rows = []
    scores = bold_lowest([entries[label].best.score for label in study.paper])
    theirs = bold_lowest([loss for _, loss in study.paper.values()])
    known = any(loss is not None for _, loss in study.paper.values())
    for (label, (name, loss)), ours, paper in zip(study.paper.items(), scores, theirs, strict=True):
        rate = show_rate(entries[label].best.config.learning_rate)
        rows.append([name, ours, rate, *([paper if loss is not None else "-"] if known else [])])
    header = [study.title, "final validation loss", "best rate"]
    return markdown([*header, *(["the paper's, LM-30M"] if known else [])], rows)


def chance_table(entries: dict[str, Entry]) -> str:
    """The usual rule, untrained and from three seeds: what is learned, and what is chance."""
    rows = []
    for label, name in USUAL.items():
        best = entries[label].best
        rows.append([name, loss_of(best.score), show_rate(best.config.learning_rate)])
    return markdown(["the usual rule", "final validation loss", "best rate"], rows)


def draw_decays(sweep: Sweep) -> Figure:
    """The final loss at the best rate over the weight decay, a panel for each task."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(sweep.tasks), squeeze=False)[0]
    for panel, (task, entries) in zip(panels, sweep.tasks.items(), strict=True):
        for entry, color, marker in zip(in_order(entries), COLORS, MARKERS, strict=False):
            best = best_by_decay(entry)
            losses = [math.nan if run.score is None else run.score for run in best.values()]
            label = LABELS[entry.label]
            panel.plot(range(len(best)), losses, f"{marker}-", color=color, label=label)
            panel.set_xticks(range(len(best)), [f"{decay:g}" for decay in best])
        panel.set_title(MODELS[task], fontsize=10)
        panel.set_xlabel("weight decay")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("final validation loss")
    panels[-1].legend(fontsize=8, frameon=False)
    return figure


def draw_long(sweep: Sweep) -> Figure:
    """Validation loss and update RMS of the best runs, a column for each schedule."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    panels = figure.subplots(2, len(sweep.tasks), sharex=True, sharey="row", squeeze=False)
    labels = [entry.label for entry in in_order(next(iter(sweep.tasks.values())))]
    for column, entries in enumerate(sweep.tasks.values()):
        above, below = panels[:, column]
        for entry in in_order(entries):
            color = COLORS[labels.index(entry.label)]
            style = {"color": color, "linewidth": 1.3, "label": LABELS[entry.label]}
            loss = best_curve(entry, "valid", "metrics", "loss")
            above.plot(*zip(*loss[1:], strict=True), **style)
            norm = thin(best_curve(entry, "train", "update_rms", "hidden"))
            below.plot(*zip(*norm, strict=True), **style)
        end = "falls to zero" if column == 0 else "stays constant"
        above.set_title(f"the rate {end}", fontsize=10)
        below.set_yscale("log")
        below.set_xlabel("step")
        for panel in (above, below):
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylabel("validation loss")
    panels[1, 0].set_ylabel("RMS of updates to hidden matrices")
    panels[0, 0].legend(fontsize=8, frameon=False)
    return figure


def draw_leads(sweep: Sweep) -> Figure:
    """The final losses relative to AdamW's, over the size of the model."""
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    panel = figure.subplots()
    tables = [{entry.label: entry for entry in in_order(row)} for row in sweep.tasks.values()]
    sizes = [size_of(task) for task in sweep.tasks]
    for label, color, marker in zip(tables[0], COLORS, MARKERS, strict=False):
        leads = [lead_over(found[label], found["adamw"]) for found in tables]
        panel.plot(sizes, leads, f"{marker}-", color=color, label=LABELS[label])
    panel.set_ylabel("final loss, log ratio to AdamW's, %")
    panel.set_xlabel("parameters")
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=8, frameon=False)
    return figure


def draw_studies(entries: dict[str, Entry]) -> Figure:
    """A panel for each of the paper's tables: our losses, and the paper's on an axis of its own."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    panels = figure.subplots(2, 4).flatten()
    panels[-1].set_axis_off()
    seeds = [loss_or_inf(entries[label].best) for label in USUAL if label != "start"]
    chance = {"color": COLORS[0], "alpha": 0.15, "linewidth": 0}
    for panel, study in zip(panels, STUDIES.values(), strict=False):
        names = [name for name, _ in study.paper.values()]
        places = range(len(names))
        scores = [entries[label].best.score for label in study.paper]
        panel.axhspan(min(seeds), max(seeds), **chance)
        panel.plot(places, [s if s is not None else math.nan for s in scores], f"{MARKERS[0]}-")
        panel.set_title(study.title, fontsize=9)
        panel.set_xticks(places, names, rotation=30, ha="right", fontsize=7)
        panel.tick_params(axis="y", labelsize=7, labelcolor=COLORS[0])
        panel.grid(alpha=0.3)
        losses = [loss for _, loss in study.paper.values()]
        if any(loss is not None for loss in losses):
            beside = panel.twinx()
            values = [math.nan if loss is None else loss for loss in losses]
            beside.plot(places, values, f"{MARKERS[1]}--", color=COLORS[1])
            beside.tick_params(axis="y", labelsize=7, labelcolor=COLORS[1])
    handles = {
        "ours, 0.85M": panels[-1].plot([], [], f"{MARKERS[0]}-", color=COLORS[0])[0],
        "the usual rule, three seeds": panels[-1].fill_between([], [], [], **chance),
        "the paper's, LM-30M": panels[-1].plot([], [], f"{MARKERS[1]}--", color=COLORS[1])[0],
    }
    panels[-1].legend(handles.values(), handles.keys(), loc="center", frameon=False)
    return figure


if __name__ == "__main__":
    main()
