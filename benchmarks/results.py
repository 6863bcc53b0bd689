"""Redraws the tables of docs/results.md and its two figures from the records in results/.

python benchmarks/results.py
"""

import re
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from celo2.evaluate.comparison import (
    Entry,
    Sweep,
    baseline_of,
    best_curve,
    edge_of,
    metric_of,
    reach,
    read_sweep,
    score_range,
    without_lost,
)
from celo2.evaluate.plots import COLORS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"
CURVES = ROOT / "docs" / "figures" / "results.png"
SUMMARY = ROOT / "docs" / "figures" / "summary.png"
NAMES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "celo2": "Celo2",
    "celo2-nesterov": "Celo2, Nesterov Adam",
    "celo2-base": "Celo2-base",
    "published": "the authors' rule",
}
ORDER = tuple(NAMES)
COLOR = dict(zip(("adamw", "muon", "celo2", "celo2-base", "published"), COLORS, strict=False))
COLOR["celo2-nesterov"] = COLOR["celo2"]
DASHES = {"published": "--", "celo2-nesterov": ":"}
TASKS = {
    "lm-0.8m": "language model, 0.85M",
    "lm-1m": "language model, 1M",
    "vit-tiny-cifar10": "ViT, CIFAR-10",
    "conv-cifar10": "convolution net, CIFAR-10",
    "image-mlp-28-mnist": "MLP, MNIST",
    "image-mlp-28-fashion_mnist": "MLP, Fashion-MNIST",
    "minatar-asterix": "PPO, Asterix",
    "minatar-freeway": "PPO, Freeway",
    "minatar-spaceinvaders": "PPO, Space Invaders",
}
MARKS = {"muon": "s", "celo2": "o", "celo2-nesterov": "*", "celo2-base": "v", "published": "D"}
COLUMNS = 3
SKIP = 0.15  # of a run's beginning, whose losses would press the rest flat


def main() -> None:
    """Reads every packed sweep and writes what depends on them."""
    sweeps = [read_sweep(path) for path in sorted((ROOT / "results").glob("*.jsonl"))]
    tasks = [(sweep, task) for sweep in sweeps for task in sweep.tasks]
    tasks.sort(key=lambda pair: list(TASKS).index(pair[1]))
    page = PAGE.read_text("utf-8")
    for sweep, task in tasks:
        page = fill(page, task, table(sweep, task))
    PAGE.write_text(page, "utf-8")
    draw_curves(tasks)
    draw_summary(tasks)
    print(PAGE, CURVES, SUMMARY, sep="\n")


def fill(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of that name."""
    marks = f"<!-- {name} -->", f"<!-- end {name} -->"
    pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
    if not re.search(pattern, page, re.DOTALL):
        raise ValueError(f"{PAGE} has no place for {name}: write {marks[0]} and {marks[1]}.")
    return re.sub(pattern, lambda _: f"{marks[0]}\n{text}\n{marks[1]}", page, flags=re.DOTALL)


def table(sweep: Sweep, task: str) -> str:
    """Every optimizer at its best, in Markdown."""
    entries = in_order(sweep.tasks[task])
    metric, _ = metric_of(entries[0])
    baseline = baseline_of(entries)
    rows = [
        f"| optimizer | best rate | tried | final {metric} | range of seeds | AdamW's final at |"
    ]
    rows.append("|---|---|---|---|---|---|")
    for entry in entries:
        scores = score_range(entry.seeds)
        found = None if baseline is None or entry is baseline else reach(entry, baseline)
        edge = edge_of(entry)
        rate = f"{entry.best.config.learning_rate:g}" + (f" ({edge})" if edge else "")
        cells = [NAMES.get(entry.label, entry.label), rate, str(entry.best.runs)]
        cells += (
            ["diverged", "-"]
            if scores is None
            else [
                f"{scores.mean:#.4g}{without_lost(entry)}",
                f"{scores.low:#.4g} – {scores.high:#.4g} ({scores.count})",
            ]
        )
        cells.append("-" if found is None else f"step {found.steps:,.0f} ({found.speed_up:.2f} ×)")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def in_order(entries: list[Entry]) -> list[Entry]:
    known = [entry for label in ORDER for entry in entries if entry.label == label]
    return known + [entry for entry in entries if entry.label not in ORDER]


def draw_curves(tasks: list[tuple[Sweep, str]]) -> None:
    """The validation curves of the best runs, a panel for each task."""
    columns = min(COLUMNS, len(tasks))
    lines = -(-len(tasks) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.7 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel in panels[len(tasks) :]:
        panel.set_axis_off()
    for panel, (sweep, task) in zip(panels, tasks, strict=False):
        entries = in_order(sweep.tasks[task])
        metric, _ = metric_of(entries[0])
        panel.set_title(TASKS[task], fontsize=9)
        panel.set_xlabel("step", fontsize=8)
        panel.set_ylabel(metric, fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.25)
        for entry in entries:
            points = best_curve(entry, "valid", "metrics", metric)
            last = max((step for step, _ in points), default=0)
            shown = [point for point in points if point[0] >= SKIP * last]
            style = {"color": COLOR[entry.label], "linewidth": 1.4}
            style["linestyle"] = DASHES.get(entry.label, "-")
            panel.plot(*zip(*shown, strict=True), label=NAMES[entry.label], **style)
    handles, labels = panels[0].get_legend_handles_labels()
    where = "outside upper center"
    figure.legend(handles, labels, loc=where, ncols=6, fontsize=9, frameon=False)
    FigureCanvasAgg(figure).print_figure(CURVES, dpi=150)


def draw_summary(tasks: list[tuple[Sweep, str]]) -> None:
    """Every optimizer's final score beside AdamW's, a line for each task; left is better."""
    figure = Figure(figsize=(8, 1.2 + 0.42 * len(tasks)), layout="constrained")
    panel = figure.subplots()
    panel.axvline(1.0, color=COLORS[0], linewidth=1.2, label="AdamW")
    for line, (sweep, task) in enumerate(tasks):
        for entry in in_order(sweep.tasks[task]):
            if entry.label != "adamw" and (found := beside_adamw(sweep, task, entry)):
                low, mean, high = found
                height = line + 0.14 * (ORDER.index(entry.label) - 3)
                style = {"color": COLOR[entry.label]}
                panel.plot([low, high], [height] * 2, linewidth=1, **style)
                style["markersize"] = 7 if entry.label == "celo2" else 5
                label = NAMES[entry.label] if line == 0 else None
                panel.plot(mean, height, MARKS[entry.label], label=label, **style)
    panel.set_yticks(range(len(tasks)), [TASKS[task] for _, task in tasks])
    panel.set_ylim(len(tasks) - 0.45, -0.55)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    panel.xaxis.set_minor_formatter(lambda x, _: f"{x:g}")
    panel.tick_params(axis="x", which="both", labelsize=8)
    games = any(task.startswith("minatar") for _, task in tasks)
    turned = " (of PPO: AdamW's return / return)" if games else ""
    panel.set_xlabel(f"final validation loss / AdamW's{turned}; left is better")
    panel.grid(axis="x", which="both", alpha=0.25)
    figure.legend(loc="outside upper center", ncols=6, fontsize=9, frameon=False)
    FigureCanvasAgg(figure).print_figure(SUMMARY, dpi=150)


def beside_adamw(sweep: Sweep, task: str, entry: Entry) -> tuple[float, float, float] | None:
    """The least, the mean and the greatest score of the seeds, as multiples of AdamW's mean."""
    baseline = baseline_of(sweep.tasks[task])
    ours = score_range(entry.seeds)
    theirs = None if baseline is None else score_range(baseline.seeds)
    if ours is None or theirs is None or entry.lost or min(ours.low, theirs.mean) <= 0:
        return None
    ratios = [score / theirs.mean for score in (ours.low, ours.mean, ours.high)]
    if metric_of(entry)[1]:
        ratios = [1 / ratio for ratio in reversed(ratios)]
    return ratios[0], ratios[1], ratios[2]


if __name__ == "__main__":
    main()
