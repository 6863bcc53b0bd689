"""Notices a run that learns nothing any more, so that it does not burn hours."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from celo2.metatrain.outer import MetaMetrics

AT_LIMIT = 0.99  # of the highest loss


@dataclass(frozen=True)
class Limits:
    """When a run is given up.

    Args:
        weight_norm: norm of the rule's weights above which it has exploded.
        patience: iterations in a row that may go wrong.
    """

    weight_norm: float = 1e3
    patience: int = 100

    def __post_init__(self):
        if self.patience < 1:
            raise ValueError(f"patience={self.patience} must be at least 1.")
        if not self.weight_norm > 0:
            raise ValueError(f"weight_norm={self.weight_norm} must be positive.")


class Diverged(RuntimeError):
    """A run that was given up; its last good checkpoint and rule are kept."""


class Trouble(NamedTuple):
    """Something wrong at an iteration; `fatal` ends the run."""

    iteration: int
    cause: str
    fatal: bool


class Streaks(NamedTuple):
    """For how many iterations in a row the loss was at its limit, or no gradient was finite."""

    stuck: int = 0
    blind: int = 0


def inspect(
    streaks: Streaks,
    limits: Limits,
    highest_loss: float,
    weights: int,
    last: int,
    metrics: MetaMetrics,
) -> tuple[Streaks, list[Trouble]]:
    """What is wrong with the iterations that end with number `last`.

    `weights` is how many the rule has. A streak is told once, at a tenth of the patience, and is
    fatal at its end; what cannot heal is fatal at once.
    """
    troubles: list[Trouble] = []
    first = last - len(metrics.loss) + 1
    warn_at = max(1, limits.patience // 10)
    for i, loss in enumerate(metrics.loss):
        iteration = first + i
        if cause := _fatal_cause(limits, float(loss), float(metrics.weight_norm[i])):
            troubles.append(Trouble(iteration, cause, True))
            break
        streaks = Streaks(
            streaks.stuck + 1 if loss >= AT_LIMIT * highest_loss else 0,
            streaks.blind + 1 if metrics.bad_entries[i] >= weights else 0,
        )
        for length, what in zip(streaks, STREAK_CAUSES, strict=True):
            if length in (warn_at, limits.patience):
                cause = f"{what} for {length} iteration{'s' * (length > 1)} in a row"
                troubles.append(Trouble(iteration, cause, length >= limits.patience))
    return streaks, troubles


STREAK_CAUSES = ("the meta-loss is at its limit", "no entry of the meta-gradient is finite")


def _fatal_cause(limits: Limits, loss: float, weight_norm: float) -> str | None:
    if not np.isfinite(weight_norm):
        return "the rule's weights are no longer finite"
    if not np.isfinite(loss):
        return f"the meta-loss is {loss}"
    if weight_norm > limits.weight_norm:
        return f"the rule's weights have norm {weight_norm:.4g}, above {limits.weight_norm:g}"
    return None
