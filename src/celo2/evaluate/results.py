"""What the runs of a recipe came to, read from their records; nothing is trained here."""

import math
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Literal, NamedTuple

from celo2.evaluate.config import RunConfig, run_name
from celo2.evaluate.find import find
from celo2.evaluate.optimizers import load_rule
from celo2.evaluate.recipe import Recipe
from celo2.evaluate.run import end_row
from celo2.rulefile import digest
from celo2.runs.records import Row

State = Literal["waiting", "stopped", "finished", "diverged", "failed"]


class Outcome(NamedTuple):
    """What became of one run."""

    name: str  # of its folder
    config: RunConfig
    state: State
    end: Row | None = None
    error: str | None = None
    fresh: bool = False  # made just now, not found finished

    @property
    def score(self) -> float | None:
        """The final validation metric; None for a run that has none."""
        return None if self.end is None else self.end["score"]


class Best(NamedTuple):
    """The best tuned setting of one optimizer on one task."""

    config: RunConfig  # with the first of the tuning seeds
    score: float | None  # mean over the tuning seeds; None if no setting has one
    runs: int  # tuning runs that have ended
    diverged: int  # of these
    final_scores: tuple[float | None, ...] = ()  # by final seed


def name_of(config: RunConfig) -> str:
    """The name of the run's folder."""
    rule = load_rule(config.optimizer)
    return run_name(config, None if rule is None else digest(rule))


def read_outcome(config: RunConfig, out: str | PathLike) -> Outcome:
    """What the run's records say."""
    name = name_of(config)
    end = end_row(Path(out) / name / "records.jsonl")
    if end is None:
        return Outcome(name, config, "waiting")
    return Outcome(name, config, "diverged" if end["diverged"] else "finished", end)


def find_best(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], Best]:
    """By task and label, the setting with the best mean score over its seeds.

    A setting of which any run diverged or failed comes last.
    """
    groups: dict[tuple[str, str], dict[RunConfig, list[Outcome]]] = {}
    for outcome in outcomes:
        config = outcome.config
        settings = groups.setdefault((config.task, str(config.label)), {})
        settings.setdefault(replace(config, seed=0), []).append(outcome)
    return {key: _best(list(settings.values())) for key, settings in groups.items()}


def summarize(recipe: Recipe, out: str | PathLike) -> dict[tuple[str, str], Best]:
    """The best of each optimizer and its final scores, as far as the records go."""
    best = find_best([read_outcome(config, out) for config in recipe.runs])
    for key, found in best.items():
        if found.score is not None:
            finals = [read_outcome(c, out) for c in recipe.finals([found.config])]
            best[key] = found._replace(final_scores=tuple(f.score for f in finals))
    return best


def _best(settings: list[list[Outcome]]) -> Best:
    chosen = min(settings, key=setting_cost)
    cost = setting_cost(chosen)
    runs = [outcome for members in settings for outcome in members]
    sign = -1.0 if find(chosen[0].config.task).higher_is_better else 1.0
    return Best(
        config=chosen[0].config,
        score=sign * cost if math.isfinite(cost) else None,
        runs=sum(outcome.end is not None for outcome in runs),
        diverged=sum(outcome.state == "diverged" for outcome in runs),
    )


def setting_cost(members: list[Outcome]) -> float:
    """The mean score of a setting's seeds, turned so that lower is better."""
    scores = [outcome.score for outcome in members]
    if any(score is None for score in scores):
        return math.inf
    mean = math.fsum(score for score in scores if score is not None) / len(scores)
    return -mean if find(members[0].config.task).higher_is_better else mean
