"""`celo2 try`: a rule on held-out problems, beside AdamW, Muon and other rules."""

import json as jsonlib
import math
from collections.abc import Iterator
from typing import Any

from celo2 import rulefile
from celo2.metatrain import heldout
from celo2.rule import ADAM_MULTIPLIER, Rule

Results = dict[str, dict[str, Any]]  # by optimizer


def try_rule(
    rule: str,
    size: heldout.Size = "full",
    against: str = "adamw,muon",
    problems: str | None = None,
    adam_multiplier: float = ADAM_MULTIPLIER,
    json: bool = False,
) -> None:
    """Train small models with a rule, each at several learning rates, and show the best losses.

    Every optimizer is tuned over as many rates. The score is the mean of log(loss / AdamW's loss):
    below 0 is better than AdamW.

    Args:
        rule: a .safetensors file, a shipped name or an hf:// address.
        size: a full try takes about a minute for each optimizer, a quick one a quarter of that.
        against: what to compare with, separated by commas: adamw, muon or other rules.
        problems: which held-out problems, separated by commas; all by default.
        adam_multiplier: the rate of Adam beside every rule, as a multiple of the rule's.
        json: print one JSON object with every rate's loss instead of a table.
    """
    if not (math.isfinite(adam_multiplier) and adam_multiplier > 0):
        raise ValueError(f"adam_multiplier={adam_multiplier} must be a positive number.")
    contenders = {rule: rulefile.as_rule(rule)} | {
        name: name if name in heldout.BASELINES else _other_rule(name)
        for name in _split(against)
        if name != rule
    }
    chosen = heldout.problems(_split(problems) if problems is not None else None, size)
    table = {}
    if not json:
        print(_line("problem", list(contenders)))
    for name, results in run(contenders, chosen, adam_multiplier):
        table[name] = results
        if not json:
            print(_line(name, [_cell(result) for result in results.values()]), flush=True)
    scores = {
        name: sum(results[name]["score"] for results in table.values()) / len(table)
        for name in contenders
    }
    found = {"size": size, "adam_multiplier": adam_multiplier}
    if json:
        print(jsonlib.dumps(found | {"score": scores, "problems": table}, indent=2))
    else:
        print(_line("score", [f"{score:+.3f}" for score in scores.values()]))


def run(
    contenders: dict[str, Rule | str],
    problems: dict[str, heldout.HeldOut],
    adam_multiplier: float,
) -> Iterator[tuple[str, Results]]:
    """Problem after problem, what each rule and baseline reaches on it."""
    for name, problem in problems.items():
        yield (
            name,
            {
                label: heldout.compare(problem, heldout.tune(problem, contender, adam_multiplier))
                for label, contender in contenders.items()
            },
        )


def _other_rule(name: str) -> Rule:
    try:
        return rulefile.as_rule(name)
    except FileNotFoundError as error:
        known = ", ".join(heldout.BASELINES)
        raise ValueError(f"{name!r} is none of {known} and no rule: {error}") from error


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _cell(result: dict[str, Any]) -> str:
    return f"{result['loss']:.4f} at {result['rate']:g}"


def _line(first: str, cells: list[str]) -> str:
    # The end of a path says more than its beginning.
    return f"{first:<12}" + "".join(f"  {cell[-20:]:>20}" for cell in cells)
