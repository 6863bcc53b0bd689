"""Writes every table of README.md and docs/ that shows records, and three figures, from these.

python benchmarks/results.py
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from celo2.evaluate.comparison import (
    Entry,
    Interval,
    Outcome,
    Sweep,
    baseline_of,
    best_curve,
    bootstrap,
    edge_of,
    interquartile_mean,
    metric_of,
    reach,
    read_sweep,
    score_range,
    without_lost,
)
from celo2.evaluate.config import find_task
from celo2.evaluate.plots import COLORS, LEAST_SEEDS
from celo2.evaluate.validation import relative_score

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CARD = ROOT / "src" / "celo2" / "pretrained" / "README.md"
CURVES = DOCS / "figures" / "results.png"
SUMMARY = DOCS / "figures" / "summary.png"
NORMS = DOCS / "figures" / "norms.png"
NAMES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "celo2": "Celo2",
    "celo2-start": "its start, untrained",
    "celo2-base": "Celo2-base",
    "published": "the authors' rule",
    "celo": "Celo",
}
ORDER = tuple(NAMES)
FURTHER = {"celo2-base-two-momenta": "Celo2-base, two momenta"}
UNTUNED = ("celo",)  # decides its steps alone: one run, as published
COLOR = dict(
    zip(("adamw", "muon", "celo2", "celo2-base", "published", "celo"), COLORS, strict=False)
)
COLOR["celo2-start"] = COLOR["celo2"]
DASHES = {"published": "--", "celo2-start": ":"}
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
NORMS_OF = ("lm-1m", "vit-tiny-cifar10", "conv-cifar10")
VALIDATION = {
    "text-tiny": "byte transformer, Shakespeare, 300 steps",
    "lm-tiny": "the same, batches of 4, 1,200 steps",
    "vit-svhn": "ViT, SVHN, 600 steps",
    "conv-svhn": "convolution net, 8×8 SVHN, 400 steps",
    "mlp-svhn": "MLP, 8×8 SVHN, 600 steps",
    "mlp-32-svhn": "MLP, SVHN, 1,000 steps",
}
MARKS = {
    "muon": "s",
    "celo2": "o",
    "celo2-start": "x",
    "celo2-base": "v",
    "published": "D",
    "celo": "P",
}
COLUMNS = 3
SKIP = 0.15  # of a run's beginning, whose losses would press the rest flat


def main() -> None:
    """Writes every page and figure that depends on the records."""
    tasks = read_tasks()
    for path, page in pages(tasks).items():
        path.write_text(page, "utf-8")
        print(path)
    draw_curves(tasks)
    draw_summary(tasks)
    draw_norms([(sweep, task) for sweep, task in tasks if task in NORMS_OF])
    print(CURVES, SUMMARY, NORMS, sep="\n")


def read_tasks() -> list[tuple[Sweep, str]]:
    """The tasks of every packed sweep, in the order of TASKS."""
    sweeps = [read_sweep(path) for path in sorted((ROOT / "results").glob("*.jsonl"))]
    tasks = [(sweep, task) for sweep in sweeps for task in sweep.tasks]
    return sorted(tasks, key=lambda pair: list(TASKS).index(pair[1]))


def pages(tasks: list[tuple[Sweep, str]]) -> dict[Path, str]:
    """Every page that shows records, as it should be; a test compares them with what is there."""
    games = [pair for pair in tasks if is_game(pair[1])]
    losses = [pair for pair in tasks if not is_game(pair[1])]
    by_task = dict(map(reversed, tasks))
    multipliers = read_sweep(DOCS / "results" / "adam-multiplier.jsonl")
    nesterov = read_sweep(DOCS / "results" / "adam-nesterov.jsonl")
    validation = read_sweep(DOCS / "results" / "validation.jsonl")
    small = [(validation, task) for task in VALIDATION]
    language_model = by_task["lm-0.8m"].tasks["lm-0.8m"]
    texts = {
        DOCS / "results.md": {
            **{task: table(sweep, task) for sweep, task in tasks},
            "differences": difference_table(losses),
            "intervals": interval_table(games),
        },
        DOCS / "learning-rate.md": {
            "rates": rate_table(language_model),
            **rate_words(language_model),
            "rates of muon": ratio_of_rates(losses, "muon"),
            "best rates": best_rate_table(tasks),
            "adam multiplier": multiplier_table(multipliers.tasks["lm-0.8m"]),
            "nesterov": nesterov_gain(nesterov.tasks["lm-0.8m"]),
        },
        ROOT / "README.md": {
            "losses": summary_table("final validation loss", losses, ".3f"),
            "games": summary_table("final return, higher is better", games, "#.3g"),
            "demo": demo_losses(DOCS / "figures" / "demo.jsonl"),
        },
        CARD: {"validation": summary_table("final validation loss", small, ".3f")},
    }
    records = DOCS / "results" / "nanogpt.jsonl"
    texts[DOCS / "nanogpt.md"] = {
        "nanogpt": nanogpt_table(records),
        "nanogpt in words": nanogpt_words(records),
    }
    texts[ROOT / "README.md"]["nanogpt"] = nanogpt_line(records)
    for name in ("index.md", "faq.md"):
        texts[DOCS / name] = {"small rates": small_rates(losses)}
    filled = {}
    for path, blocks in texts.items():
        page = path.read_text("utf-8")
        for name, text in blocks.items():
            page = fill(page, name, text, path)
        filled[path] = page
    return filled


def fill(page: str, name: str, text: str, path: Path) -> str:
    """The page with `text` between the marks of that name; a table gets lines of its own."""
    marks = f"<!-- {name} -->", f"<!-- end {name} -->"
    pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
    if not re.search(pattern, page, re.DOTALL):
        raise ValueError(f"{path} has no place for {name}: write {marks[0]} and {marks[1]}.")
    inside = f"\n{text}\n" if "\n" in text else text
    return re.sub(pattern, lambda _: f"{marks[0]}{inside}{marks[1]}", page, flags=re.DOTALL)


def is_game(task: str) -> bool:
    """Whether the score is a return, of which more is better."""
    return find_task(task).higher_is_better


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [
        "|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in (header, *rows)
    ]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def mean_score(runs: Iterable[Outcome]) -> float | None:
    """The mean over seeds; None where one of them has no score."""
    scores = [run.score for run in runs]
    return None if not scores or None in scores else fmean(scores)


def summary_table(title: str, tasks: list[tuple[Sweep, str]], form: str) -> str:
    """The final score of every optimizer on every task, the best of each task in bold."""
    # The label of a rule that was given as a file is its path.
    labels = {Path(entry.label).stem for sweep, task in tasks for entry in sweep.tasks[task]}
    columns = [label for label in ORDER if label in labels] + sorted(labels - set(ORDER))
    rows = []
    for sweep, task in tasks:
        scores = {Path(e.label).stem: mean_score(e.seeds) for e in sweep.tasks[task]}
        known = {label: score for label, score in scores.items() if score is not None}
        best = (max if is_game(task) else min)(known, key=known.__getitem__)
        cells = [format(known[label], form) if label in known else "-" for label in columns]
        bold = [f"**{c}**" if n == best else c for n, c in zip(columns, cells, strict=True)]
        rows.append([(TASKS | VALIDATION)[task].removeprefix("PPO, "), *bold])
    return markdown([title, *((NAMES | FURTHER).get(label, label) for label in columns)], rows)


def log_ratio(ours: Mapping[str, Entry], theirs: Mapping[str, Entry]) -> str:
    """The mean of log(our loss / their loss) over tasks and its standard error, in percent."""
    found = relative_score(ours, theirs)
    return f"{100 * found['score']:+.1f} ± {100 * found['error']:.1f}"


def difference_table(tasks: list[tuple[Sweep, str]]) -> str:
    """The log ratio of Celo2's loss to those of others, and its standard error, in percent."""
    pairs = [("celo2", name) for name in ("muon", "celo2-start", "published", "adamw")]
    pairs.append(("celo2-base", "adamw"))
    entries = {(task, e.label): e for sweep, task in tasks for e in sweep.tasks[task]}

    def cell(ours: str, theirs: str, among: Iterable[str]) -> str:
        return log_ratio(*({t: entries[t, name] for t in among} for name in (ours, theirs)))

    names = [task for _, task in tasks]
    rows = [[TASKS[name], *(cell(*pair, [name]) for pair in pairs)] for name in names]
    rows.append(["mean", *(cell(*pair, names) for pair in pairs)])
    header = [f"{NAMES[a]} to {NAMES[b]}" for a, b in pairs]
    return markdown(["log ratio of losses, %", *header], rows)


def interval_table(tasks: list[tuple[Sweep, str]]) -> str:
    """Mean returns with bootstrap intervals over seeds, of optimizers that have enough of them."""
    by_task = {task: {e.label: e.scores for e in sweep.tasks[task]} for sweep, task in tasks}
    labels = [
        label
        for label in ORDER
        if all(len(found.get(label, ())) >= LEAST_SEEDS for found in by_task.values())
    ]

    def cell(interval: Interval, form: str) -> str:
        value, low, high = (format(number, form) for number in interval)
        return f"{value} ({low} – {high})"

    rows = []
    for task, found in by_task.items():
        cells = [cell(bootstrap([found[label]]), ".1f") for label in labels]
        rows.append([TASKS[task].removeprefix("PPO, "), *cells])
    relative = {
        label: [
            [score / fmean(found["adamw"]) for score in found[label]] for found in by_task.values()
        ]
        for label in labels
    }
    together = [cell(bootstrap(relative[label], interquartile_mean), ".2f") for label in labels]
    rows.append(["all three, over AdamW's mean", *together])
    return markdown(["mean return", *(NAMES[label] for label in labels)], rows)


def rate_table(entries: list[Entry]) -> str:
    """The final loss of each optimizer by rate, seed 0, the lowest in bold."""
    rows = []
    for entry in in_order(entries):
        if entry.label in UNTUNED:
            continue
        runs = sorted(entry.tuning, key=lambda run: run.config.learning_rate)
        rates = [show_rate(run.config.learning_rate) for run in (runs[0], runs[-1])]
        best = min(run.score for run in runs if run.score is not None)
        cells = ["diverged" if run.score is None else f"{run.score:.3f}" for run in runs]
        bold = [f"**{c}**" if r.score == best else c for r, c in zip(runs, cells, strict=True)]
        rows.append([f"{NAMES.get(entry.label, entry.label)}, {' … '.join(rates)}", *bold])
    between = [""] * (max(map(len, rows)) - 3)
    return markdown(["", "lowest", *between, "highest"], rows)


def best_rate_table(tasks: list[tuple[Sweep, str]]) -> str:
    """Each optimizer's best rate on each task."""
    columns = [label for label in ORDER if label not in ("celo2-start", *UNTUNED)]
    rows = []
    for sweep, task in tasks:
        found = {entry.label: entry for entry in sweep.tasks[task]}
        steps = found["adamw"].best.config.steps
        cells = []
        for label in columns:
            edge = edge_of(found[label]) if label in found else None
            rate = show_rate(found[label].best.config.learning_rate) if label in found else "-"
            cells.append(rate + (f" (the {edge} tried)" if edge else ""))
        kind = "iterations" if is_game(task) else "steps"
        rows.append([f"{TASKS[task]}, {steps:,} {kind}", *cells])
    return markdown(["", *(NAMES[label] for label in columns)], rows)


def rate_words(entries: list[Entry]) -> dict[str, str]:
    """What the learning-rate page says of one language model's rates."""
    found = {entry.label: entry for entry in entries}
    best = {label: entry.best.config.learning_rate for label, entry in found.items()}

    def costs(label: str) -> str:
        scores = sorted((run.config.learning_rate, run.score) for run in found[label].tuning)
        at = [rate for rate, _ in scores].index(best[label])
        beside = [score for _, score in scores[max(0, at - 1) : at] + scores[at + 1 : at + 2]]
        losses = sorted(score - scores[at][1] for score in beside)
        return f"{NAMES[label]} {losses[0]:.2f} to {losses[-1]:.2f}"

    return {
        "best rate": " and ".join(
            f"{best['celo2'] / best[other]:.2g} of {NAMES[other]}'s" for other in ("adamw", "muon")
        ),
        "factor of two": ", ".join(map(costs, ("celo2", "adamw", "muon"))),
        "rate of base": f"{best['celo2-base'] / best['celo2']:.2g}",
    }


def ratio_of_rates(tasks: list[tuple[Sweep, str]], other: str) -> str:
    """Celo2's best rate as a part of another optimizer's, least and most over the tasks."""
    ratios = []
    for sweep, task in tasks:
        best = {entry.label: entry.best.config.learning_rate for entry in sweep.tasks[task]}
        ratios.append(best["celo2"] / best[other])
    return f"{min(ratios):.2g} to {max(ratios):.2g}"


def small_rates(tasks: list[tuple[Sweep, str]]) -> str:
    """Celo2's lowest and highest best rate on the problems with a loss, and in the demo."""
    rates = [
        entry.best.config.learning_rate
        for sweep, task in tasks
        for entry in sweep.tasks[task]
        if entry.label == "celo2"
    ]
    rows = map(json.loads, (DOCS / "figures" / "demo.jsonl").read_text("utf-8").splitlines())
    demo = [row for row in rows if row["optimizer"] == "Celo2"]
    rates.append(min(demo, key=lambda row: row["valid_loss"])["rate"])
    return f"{show_rate(min(rates))} to {show_rate(max(rates))}"


def multiplier_table(entries: list[Entry]) -> str:
    """The final loss by AdamW's multiple of the rule's rate."""
    means = [mean_score(entry.tuning) for entry in entries]
    lowest = min(mean for mean in means if mean is not None)
    shown = [f"**{mean:.3f}**" if mean == lowest else f"{mean:.3f}" for mean in means]
    seeds = [", ".join(f"{run.score:.3f}" for run in entry.tuning) for entry in entries]
    rows = [["final validation loss", *shown], ["of seeds 0 and 1", *seeds]]
    return markdown(["factor", *(entry.label.removesuffix(" ×") for entry in entries)], rows)


def nesterov_gain(entries: list[Entry]) -> str:
    """By how much Nesterov's momentum in AdamW lowers the loss, least and most over the rates."""
    found = {entry.label: entry for entry in entries}
    # The records are of version 0.1, where celo2 has the paper's plain AdamW.
    plain, nesterov = (
        {run.config.learning_rate: run.score for run in found[label].tuning}
        for label in ("celo2", "celo2-nesterov")
    )
    gains = [plain[rate] - nesterov[rate] for rate in plain]
    return f"{min(gains):.3f} to {max(gains):.3f}"


def demo_losses(path: Path) -> str:
    """The best validation loss of each optimizer in the demo."""
    best: dict[str, float] = {}
    for row in map(json.loads, path.read_text("utf-8").splitlines()):
        name, loss = row["optimizer"], row["valid_loss"]
        best[name] = min(loss, best.get(name, loss))
    return ", ".join(f"{name} {loss:.3f}" for name, loss in best.items())


def nanogpt_table(path: Path) -> str:
    """Each optimizer of examples/nanogpt at its best rate, and at nanoGPT's own, 1e-3."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    lines = []
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        mine = [row for row in rows if row["optimizer"] == name]
        first = {row["rate"]: row["valid_loss"] for row in mine if row["seed"] == mine[0]["seed"]}
        best = min(first, key=first.__getitem__)
        losses = [row["valid_loss"] for row in mine if row["rate"] == best]
        seeds = f"{min(losses):.3f} – {max(losses):.3f} ({len(losses)})"
        usual = f"{first[1e-3]:.3f}" if 1e-3 in first else "-"
        rates = f"{show_rate(min(first))} … {show_rate(max(first))}"
        cells = [NAMES[name], rates, show_rate(best), f"{fmean(losses):.3f}", seeds, usual]
        lines.append(cells)
    header = ["final validation loss", "rates tried", "best rate", "loss at best rate"]
    return markdown([*header, "range of seeds", "loss at 1e-3"], lines)


def nanogpt_losses(path: Path) -> tuple[dict[str, float], dict[str, float | None]]:
    """Each optimizer's mean loss over seeds at its best rate, and its loss at 1e-3 if it ran."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    first = rows[0]["seed"]
    tuned, usual = {}, {}
    for name in ("adamw", "muon", "celo2"):
        mine = [row for row in rows if row["optimizer"] == name]
        losses = {row["rate"]: row["valid_loss"] for row in mine if row["seed"] == first}
        usual[name], best = losses.get(1e-3), min(losses, key=losses.__getitem__)
        tuned[name] = fmean(row["valid_loss"] for row in mine if row["rate"] == best)
    return tuned, usual


def nanogpt_words(path: Path) -> str:
    """Celo2 beside AdamW at nanoGPT's own rate, and beside both others with tuned rates."""
    tuned, usual = nanogpt_losses(path)

    def beside(other: str) -> str:
        percent = 100 * (tuned["celo2"] / tuned[other] - 1)
        return f"{abs(percent):.1f} % {'below' if percent < 0 else 'above'} {NAMES[other]}"

    return (
        f"the loss at 1e-3 is {usual['celo2']:.3f} instead of {usual['adamw']:.3f} (one seed). "
        f"With tuned rates Celo2 is {beside('adamw')} and {beside('muon')}"
    )


def nanogpt_line(path: Path) -> str:
    """The same in a line."""
    tuned, usual = nanogpt_losses(path)
    return (
        f"from {usual['adamw']:.3f} to {usual['celo2']:.3f}; with tuned learning rates AdamW has "
        f"{tuned['adamw']:.3f} and Muon {tuned['muon']:.3f}"
    )


def show_rate(rate: float) -> str:
    """The rate as people write it: 4e-3, 2.15e-4."""
    digits, power = f"{rate:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def table(sweep: Sweep, task: str) -> str:
    """Every optimizer at its best, in Markdown."""
    entries = in_order(sweep.tasks[task])
    metric, _ = metric_of(entries[0])
    baseline = baseline_of(entries)
    header = ["optimizer", "best rate", "rates tried", f"final {metric}", "range of seeds"]
    header.append(f"reaches AdamW's final {metric} at")
    rows = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
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
    place_legend(figure, panels)
    FigureCanvasAgg(figure).print_figure(CURVES, dpi=150)


def draw_norms(tasks: list[tuple[Sweep, str]]) -> None:
    """The RMS of updates to hidden matrices, and of these, in the best runs; a column a task."""
    figure = Figure(figsize=(3.2 * len(tasks), 5), layout="constrained")
    panels = figure.subplots(2, len(tasks), sharex="col", squeeze=False)
    for column, (sweep, task) in enumerate(tasks):
        panels[0, column].set_title(TASKS[task], fontsize=9)
        panels[1, column].set_xlabel("step", fontsize=8)
        panels[0, column].set_yscale("log")
        for panel, field in zip(panels[:, column], ("update_rms", "param_rms"), strict=True):
            panel.tick_params(labelsize=7)
            panel.grid(alpha=0.25)
            for entry in in_order(sweep.tasks[task]):
                # Without the last, when most rates are zero.
                points = best_curve(entry, "train", field, "hidden")[:-1]
                style = {"color": COLOR[entry.label], "linewidth": 1.4}
                style["linestyle"] = DASHES.get(entry.label, "-")
                panel.plot(*zip(*points, strict=True), label=NAMES[entry.label], **style)
    panels[0, 0].set_ylabel("RMS of updates", fontsize=8)
    panels[1, 0].set_ylabel("RMS of weights", fontsize=8)
    place_legend(figure, panels[0])
    FigureCanvasAgg(figure).print_figure(NORMS, dpi=150)


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
                style["label"] = NAMES[entry.label]
                panel.plot(mean, height, MARKS[entry.label], linestyle="", **style)
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
    place_legend(figure, [panel])
    FigureCanvasAgg(figure).print_figure(SUMMARY, dpi=150)


def place_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """One legend above the panels, each optimizer once."""
    found = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        found = dict(zip(labels, handles, strict=True)) | found
    shown = [name for name in NAMES.values() if name in found]
    figure.legend(
        [found[name] for name in shown],
        shown,
        loc="outside upper center",
        ncols=4,
        fontsize=9,
        frameon=False,
    )


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
