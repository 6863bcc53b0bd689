"""What a reader has to know before trusting a comparison."""

from collections.abc import Sequence

from celo2.evaluate.comparison import Entry, Sweep, edge_of
from celo2.evaluate.fairness import unlike_data, unlike_work


def notes(entries: Sequence[Entry]) -> list[str]:
    """Sentences on the optimizers of one task: first their budgets, then each one's own doubts."""
    budgets = [len(entry.tuning) for entry in entries]
    counts = ", ".join(f"{e.label} {n}" for e, n in zip(entries, budgets, strict=True))
    if len(set(budgets)) > 1:
        found = [f"Unequal tuning budgets, which favour the larger: {counts} runs."]
    else:
        found = [f"Equal tuning budgets: {budgets[0]} for each optimizer, in runs."]
    work = unlike_work([run.config for entry in entries for run in entry.tuning])
    found += [f"Not the same problem: {what}." for what in work]
    return found + [f"{entry.label}: {note}" for entry in entries for note in _doubts(entry)]


def data_notes(sweep: Sweep) -> list[str]:
    """A sentence for each task whose runs were not all on the same data."""
    found = []
    for task, entries in sweep.tasks.items():
        names = [run.name for entry in entries for run in (*entry.tuning, *entry.seeds)]
        if what := unlike_data(sweep.rows, names):
            found.append(f"{task}: {what}; scores cannot be compared.")
    return found


def but_lost(entry: Entry) -> str:
    """What to say behind a mean that some seeds are not in."""
    return f" ({entry.lost} of {len(entry.seeds)} diverged)" if entry.lost else ""


def _doubts(entry: Entry) -> list[str]:
    best, found = entry.best, []
    runs = {run.name: run for run in (*entry.tuning, *entry.seeds)}.values()
    if edge := edge_of(entry):
        rate = f"{best.config.learning_rate:g}"
        found.append(f"its best rate, {rate}, is the {edge} tried; others may be better.")
    if len({run.config.learning_rate for run in entry.tuning}) == 1:
        found.append("one learning rate only; it was not tuned.")
    if best.score is None:
        found.append("no setting came to a score.")
    elif sum(run.score is not None for run in entry.seeds) == 1:
        found.append("a single seed; its spread is unknown.")
    if entry.lost:
        found.append(f"{entry.lost} of {len(entry.seeds)} seeds diverged at the best rate.")
    if waiting := sum(run.state == "waiting" for run in runs):
        found.append(f"{waiting} of {len(runs)} runs have not ended.")
    if errors := [run.error for run in runs if run.state == "failed"]:
        found.append(f"{len(errors)} of {len(runs)} runs failed, as with {errors[0]}.")
    return found
