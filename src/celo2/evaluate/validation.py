"""Compares a rule with other optimizers on the validation suite, an ordinary recipe."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from statistics import fmean, variance
from typing import Any, Literal

from celo2.evaluate.comparison import Entry, Outcome, as_text, compare, score_range, sensitivity
from celo2.evaluate.config import RunConfig, uses_lstm
from celo2.evaluate.optimizers import load_rule
from celo2.evaluate.recipe import Recipe, choose, parse_recipe
from celo2.tasks.datafiles import data_folder
from celo2.tasks.images import image_file
from celo2.tasks.text import text_files

Size = Literal["quick", "full"]
FILES: dict[Size, Path] = {
    "quick": Path(__file__).with_name("validation-quick.toml"),
    "full": Path(__file__).with_name("validation.toml"),
}
BASELINES = ("adamw", "muon")
IMAGES = "svhn"  # of the full suite


def default_size(data: str | PathLike | None = None) -> Size:
    """`full` where the images that it needs are in the data folder, else `quick`."""
    files = (data_folder(data) / image_file(IMAGES, size) for size in ("8x8", "full"))
    return "full" if all(file.is_file() for file in files) else "quick"


def validation_recipe(
    labels: Sequence[str],
    size: Size,
    *,
    data: str | PathLike | None = None,
    adam_multiplier: float | None = None,
) -> Recipe:
    """The suite for these optimizers: AdamW and Muon by their names, rules by name or file.

    Args:
        labels: what to compare, each named once.
        size: which of the two suites.
        data: folder of the data files; by default CELO2_DATA, else the cache folder.
        adam_multiplier: the rate of Adam beside every rule, as a multiple of the rule's.
    """
    content = tomllib.loads(FILES[size].read_text("utf-8"))
    for label in labels:
        if label in BASELINES:
            continue
        rule = load_rule(label)
        if rule is None or uses_lstm(label):
            raise ValueError(
                f"{label!r} is neither {' nor '.join(BASELINES)} nor a rule of Celo2: the suite "
                "has no rates for it."
            )
        # Without Newton–Schulz the best rates are AdamW's rather than Muon's.
        tuned_as = "celo2" if rule.config.orthogonalize else "celo2-base"
        content["optimizers"][label] = content["optimizers"][tuned_as] | {"optimizer": label}
    plan = choose(parse_recipe(content, FILES[size].stem), labels)

    def adjust(config: RunConfig) -> RunConfig:
        if config.text and not all(file.is_file() for file in text_files(config.text, folder)):
            config = replace(config, text=None)
        if adam_multiplier is not None and config.label not in BASELINES:
            config = replace(config, adam_multiplier=adam_multiplier)
        return config

    folder = data_folder(data)
    return replace(plan, runs=tuple(map(adjust, plan.runs)))


def judge(recipe: Recipe, outcomes: Sequence[Outcome], rule: str) -> dict[str, Any]:
    """The results of a rule relative to the other optimizers of the recipe, as JSON.

    `score` is the mean of log(loss / the baseline's loss) over tasks and seeds, the baseline being
    the first of the others; `against` has it for each of them. `error` is its standard error over
    seeds, of pairs with the same task and seed. Both are None if a run has no score.
    """
    runs = {run.config: run for run in outcomes}
    if failed := [run for run in outcomes if run.error is not None]:
        raise ValueError(f"{failed[0].name} failed: {failed[0].error}")
    tuned = compare([runs[config] for config in recipe.runs], outcomes)
    entries = {
        label: {task: entry for task, row in tuned.items() for entry in row if entry.label == label}
        for label in dict.fromkeys(str(config.label) for config in recipe.runs)
    }
    others = [label for label in entries if label != rule]
    optimizers = {
        label: {
            "against": {other: relative_score(mine, entries[other]) for other in others},
            "problems": {task: _result(entry) for task, entry in mine.items()},
        }
        for label, mine in entries.items()
    }
    return {
        "rule": rule,
        **optimizers[rule]["against"].get(others[0] if others else None, {}),
        "against": optimizers[rule]["against"],
        "problems": {
            task: result | {other: optimizers[other]["problems"][task]["loss"] for other in others}
            for task, result in optimizers[rule]["problems"].items()
        },
        "optimizers": {other: optimizers[other] for other in others},
    }


def relative_score(
    ours: Mapping[str, Entry], theirs: Mapping[str, Entry]
) -> dict[str, float | None]:
    """The mean of log(our loss / their loss) and its standard error; tasks have equal weight."""
    means, squares = [], []
    for task, entry in ours.items():
        mine, other = (
            {run.config.seed: run.score for run in e.seeds} for e in (entry, theirs[task])
        )
        pairs = [(mine[seed], other.get(seed)) for seed in mine]
        if not pairs or any(a is None or b is None for a, b in pairs):
            return {"score": None, "error": None}
        logs = [math.log(a / b) for a, b in pairs if a and b]
        means.append(fmean(logs))
        squares.append(variance(logs) / len(logs) if len(logs) > 1 else math.nan)
    error = math.sqrt(math.fsum(squares)) / len(squares)
    return {"score": fmean(means), "error": None if math.isnan(error) else error}


def _result(entry: Entry) -> dict[str, Any]:
    """An optimizer on one task: its mean loss over seeds, at its best rate, and every rate's."""
    score, curve = score_range(entry.seeds), sensitivity(entry)
    return {
        "loss": None if score is None or entry.lost else score.mean,
        "rate": entry.best.config.learning_rate,
        "seeds": [run.score for run in entry.seeds],
        "rates": [rate for rate, _ in curve],
        "losses": [loss for _, loss in curve],
    }


def as_table(result: Mapping[str, Any]) -> str:
    """The result of `judge` as a table: a row for each task, then the relative scores."""
    columns = {result["rule"]: result, **result["optimizers"]}
    rows = [["task", *(label[-24:] for label in columns)]]
    for task in result["problems"]:
        found = [column["problems"][task] for column in columns.values()]
        cells = (
            "diverged" if f["loss"] is None else f"{f['loss']:.4f} at {f['rate']:g}" for f in found
        )
        rows.append([task, *cells])
    for other in result["against"]:
        cells = (describe_score(column["against"][other]) for column in columns.values())
        rows.append([f"log ratio to {other}", *cells])
    return as_text(rows)


def describe_score(found: Mapping[str, Any]) -> str:
    """A relative score and its standard error.

    >>> describe_score({"score": -0.0312, "error": 0.004})
    '-0.0312 ± 0.0040'
    """
    if found.get("score") is None:
        return "diverged"
    error = "" if found.get("error") is None else f" ± {found['error']:.4f}"
    return f"{found['score']:+.4f}{error}"
