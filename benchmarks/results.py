"""Redraws the tables of docs/results.md and docs/figures/results.png from the records in results/.

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
    spread,
)
from celo2.evaluate.plots import COLORS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"
FIGURE = ROOT / "docs" / "figures" / "results.png"
ORDER = ("adamw", "muon", "celo2", "celo2-base", "published")
NAMES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "celo2": "Celo2",
    "celo2-base": "Celo2-base",
    "published": "the authors' rule",
}
COLUMNS = 4
SKIP = 0.15  # of a run's beginning, whose losses would press the rest flat


def main() -> None:
    """Reads every packed sweep and writes what depends on them."""
    sweeps = [read_sweep(path) for path in sorted((ROOT / "results").glob("*.jsonl"))]
    tasks = [(sweep, task) for sweep in sweeps for task in sweep.tasks]
    page = PAGE.read_text("utf-8")
    for sweep, task in tasks:
        page = fill(page, task, table(sweep, task))
    PAGE.write_text(page, "utf-8")
    draw(tasks)
    print(PAGE, FIGURE)


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
    metric, _ = metric_of(sweep, entries[0])
    baseline = baseline_of(entries)
    rows = [
        f"| optimizer | best rate | tried | final {metric} | range of seeds | AdamW's final at |"
    ]
    rows.append("|---|---|---|---|---|---|")
    for entry in entries:
        scores = spread(run.score for run in entry.seeds)
        found = None if baseline is None or entry is baseline else reach(sweep, entry, baseline)
        edge = edge_of(entry)
        rate = f"{entry.best.config.learning_rate:g}" + (f" ({edge})" if edge else "")
        cells = [NAMES.get(entry.label, entry.label), rate, str(entry.best.runs)]
        cells += (
            ["diverged", "-"]
            if scores is None
            else [f"{scores.mean:.4g}", f"{scores.low:.4g} – {scores.high:.4g} ({scores.count})"]
        )
        cells.append("-" if found is None else f"step {found.steps:,.0f} ({found.speed_up:.2f} ×)")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def in_order(entries: list[Entry]) -> list[Entry]:
    known = [entry for label in ORDER for entry in entries if entry.label == label]
    return known + [entry for entry in entries if entry.label not in ORDER]


def draw(tasks: list[tuple[Sweep, str]]) -> None:
    """The validation curves of the best runs, a panel for each task."""
    columns = min(COLUMNS, len(tasks))
    lines = -(-len(tasks) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.7 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel in panels[len(tasks) :]:
        panel.set_axis_off()
    for panel, (sweep, task) in zip(panels, tasks, strict=False):
        entries = in_order(sweep.tasks[task])
        metric, _ = metric_of(sweep, entries[0])
        panel.set_title(task, fontsize=9)
        panel.set_xlabel("step", fontsize=8)
        panel.set_ylabel(metric, fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(alpha=0.25)
        for entry in entries:
            points = best_curve(sweep, entry, "valid", "metrics", metric)
            last = max((step for step, _ in points), default=0)
            shown = [point for point in points if point[0] >= SKIP * last]
            style = {"color": COLORS[ORDER.index(entry.label)], "linewidth": 1.4}
            style |= {"linestyle": "--"} if entry.label == "published" else {}
            panel.plot(*zip(*shown, strict=True), label=NAMES[entry.label], **style)
    panels[0].legend(fontsize=7, frameon=False)
    FIGURE.parent.mkdir(exist_ok=True)
    FigureCanvasAgg(figure).print_figure(FIGURE, dpi=150)


if __name__ == "__main__":
    main()
