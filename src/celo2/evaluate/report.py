"""A sweep as one HTML page that needs no other file, made from its records alone."""

import base64
import io
import time
from collections.abc import Iterable, Sequence
from html import escape
from os import PathLike
from pathlib import Path

from celo2.evaluate.comparison import (
    Entry,
    Sweep,
    caveats,
    cost_caveats,
    cost_table,
    data_caveats,
    metric_of,
    score_range,
    score_table,
)
from celo2.evaluate.plots import FIGURES, write_svg
from celo2.evaluate.recipe import TEXTS
from celo2.rulefile import write_whole
from celo2.runs.records import Row

TITLES = {
    "curves": "Best setting of each: training as a line, validation as points",
    "rates": "Learning-rate sensitivity",
    "settings": "Every run: what was varied, and where it ended; dashed lines diverged",
    "update_rms": "RMS of updates, learning rate included",
    "param_rms": "RMS of parameters",
}
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff;
  max-width: 70rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.3rem; margin-top: 2.5rem;
  border-top: 1px solid #d0d7de; padding-top: 1rem; } h3 { font-size: 1.05rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid #d0d7de;
  white-space: nowrap; }
th { background: #f6f8fa; font-weight: 600; }
th:first-child, td:first-child, .facts td { text-align: left; }
.facts td { white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
.facts td:first-child { color: #57606a; white-space: nowrap; }
.best { font-weight: 700; }
.scroll td:first-child { position: sticky; left: 0; background: #fff; }
@media (max-width: 40rem) { .scroll { box-shadow: inset -9px 0 9px -9px #57606a; } }
.caveats { background: #fff8e5; border-left: 4px solid #d4a72c; padding: .5rem 1rem .5rem 2rem;
  overflow-wrap: anywhere; }
.figures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; } figure img { width: 100%; height: auto; }
figcaption, .small { color: #57606a; font-size: .85rem; }
"""
READ = (
    "The best setting of an optimizer is the one with the best mean final validation score among "
    "its tuning runs; it is then run with the final seeds, where the recipe has any. A seed that "
    "is among both was looked at when choosing, which flatters its score a little. The range is "
    "from the lowest to the highest seed; bold is the best mean, however small its lead. Speed-up "
    "is AdamW's number of steps, divided by the step at which the mean validation curve first "
    "reaches AdamW's final mean, on straight lines between validations; it counts steps, not "
    "seconds. Learning-rate schedules end at the last step, so a shorter run would need a "
    "schedule of its own to be as good. Times are medians over runs, and another load on the "
    "machine changes them; runs of a sweep share compiled programs."
)


def write_page(sweep: Sweep, out: str | PathLike) -> Path:
    """Writes the page of a sweep and returns its path."""
    page = build_page(sweep)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(out), page.encode())
    return Path(out)


def build_page(sweep: Sweep) -> str:
    """The page as HTML."""
    title = f"Comparison {sweep.name}"
    sections = "\n".join(_section(sweep, task) for task in sweep.tasks)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{_facts_table(facts(sweep))}
{_caveat_list(data_caveats(sweep))}
{sections}
<h2>How to read this</h2>
<p class="small">{escape(READ)}</p>
</body>
</html>
"""


def facts(sweep: Sweep) -> list[tuple[str, str]]:
    """The origin of the records; where runs differ, every value is listed."""
    rows = [row for run in sweep.runs for row in run.rows]
    starts = [row for row in rows if row.get("kind") == "start"]
    started = [row for row in rows if row.get("versions")]
    ended = sum(run.end is not None for run in sweep.runs)
    times = [row["time"] for row in starts if row.get("time") is not None]
    days = sorted({time.strftime("%Y-%m-%d", time.gmtime(moment)) for moment in times})
    rules = {(row["config"]["label"], row["rule"]) for row in starts if row.get("rule")}
    lines = [(key, str(sweep.index[key])) for key in TEXTS if sweep.index.get(key)]
    lines += [("runs", f"{ended} of {len(sweep.runs)} ended")]
    lines += [("date (UTC)", " to ".join(dict.fromkeys((days[0], days[-1]))))] if days else []
    lines += [("versions", text) for text in _distinct(row["versions"] for row in started)]
    lines += [
        ("hardware", text) for text in _distinct(row.get("hardware") or {} for row in started)
    ]
    return lines + [("rule", f"{label}: SHA-256 {rule}") for label, rule in sorted(rules)]


def _section(sweep: Sweep, task: str) -> str:
    entries = sweep.tasks[task]
    metric, higher = metric_of(entries[0])
    config = entries[0].best.config
    about = f"{config.steps} steps of {config.batch} examples; compared by {metric}, where "
    about += f"{'higher' if higher else 'lower'} is better{_parameters(entries)}."
    figures = "\n".join(_figure(sweep, task, name) for name in FIGURES)
    return f"""<h2>{escape(task)}</h2>
<p>{escape(about)}</p>
{_table(score_table(entries), _winner(entries, higher))}
{_caveat_list(caveats(entries))}
<div class="figures">
{figures}
</div>
<h3>Cost</h3>
{_caveat_list(cost_caveats(entries))}
{_table(cost_table(entries))}"""


def _caveat_list(sentences: Sequence[str]) -> str:
    lines = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="caveats">{lines}</ul>' if lines else ""


def _parameters(entries: Sequence[Entry]) -> str:
    rows = [row for entry in entries for run in entry.tuning for row in run.rows]
    sizes = next((row["sizes"] for row in rows if row.get("sizes")), None)
    return f"; {sizes['parameters']:,} parameters" if sizes else ""


def _winner(entries: Sequence[Entry], higher: bool) -> str | None:
    sound = [entry for entry in entries if not entry.lost]
    means = {entry.label: score_range(entry.seeds) for entry in sound}
    found = {label: score.mean for label, score in means.items() if score is not None}
    return (max if higher else min)(found, key=found.__getitem__) if found else None


def _figure(sweep: Sweep, task: str, name: str) -> str:
    file, title = io.BytesIO(), escape(TITLES[name])
    write_svg(FIGURES[name](sweep, task), file)
    data = base64.b64encode(file.getvalue()).decode()
    alt = escape(f"{TITLES[name]}, {task}", quote=True)
    return f"""<figure><img alt="{alt}" src="data:image/svg+xml;base64,{data}">
<figcaption>{title}</figcaption></figure>"""


def _table(rows: Sequence[Sequence[str]], best: str | None = None) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "\n".join(_row(row, ' class="best"' if row[0] == best else "") for row in rows[1:])
    inner = f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody>"
    return f'<div class="scroll"><table>{inner}</table></div>'


def _facts_table(lines: Iterable[tuple[str, str]]) -> str:
    return f'<table class="facts"><tbody>{"".join(_row(line) for line in lines)}</tbody></table>'


def _row(cells: Iterable[str], attribute: str = "") -> str:
    return f"<tr{attribute}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _distinct(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(", ".join(f"{k} {v}" for k, v in row.items()) for row in rows))
