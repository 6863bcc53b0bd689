"""When a meta-training run has diverged and is given up."""

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


class Trouble(NamedTuple):
    """Something wrong at an iteration; `fatal` ends the run."""

    iteration: int
    cause: str
    fatal: bool


class Streaks(NamedTuple):
    """For how many iterations in a row something was wrong."""

    stuck: int = 0  # the loss was at its limit
    blind: int = 0  # no entry of the gradient was finite
    idle: int = 0  # neither, and the gradient was zero

    @property
    def bad(self) -> bool:
        """Whether the rule may be spoilt; an idle one is as good as it was."""
        return self.stuck > 0 or self.blind > 0


def inspect(
    streaks: Streaks,
    limits: Limits,
    highest_loss: float,
    weights: int,
    last: int,
    metrics: MetaMetrics,
) -> tuple[Streaks, list[Trouble]]:
    """What is wrong with the iterations that end with number `last`.

    `weights` is how many the rule has. A streak is reported once, at a tenth of the patience, and
    is fatal at its end, but for an idle one; what cannot heal is fatal at once.
    """
    troubles: list[Trouble] = []
    first = last - len(metrics.loss) + 1
    warn_at = max(1, limits.patience // 10)
    for i, loss in enumerate(metrics.loss):
        iteration = first + i
        if cause := _fatal_cause(limits, float(loss), float(metrics.weight_norm[i])):
            troubles.append(Trouble(iteration, cause, True))
            break
        stuck, blind = loss >= AT_LIMIT * highest_loss, metrics.bad_entries[i] >= weights
        idle = metrics.gradient_norm[i] == 0 and not stuck and not blind
        now = (stuck, blind, idle)
        streaks = Streaks(*(n + 1 if up else 0 for n, up in zip(streaks, now, strict=True)))
        for name, length in streaks._asdict().items():
            if length == warn_at or (length == limits.patience and name != "idle"):
                cause = f"{STREAK_CAUSES[name]} for {length} iteration{'s' * (length > 1)} in a row"
                fatal = length >= limits.patience and name != "idle"
                troubles.append(Trouble(iteration, cause, fatal))
    return streaks, troubles


STREAK_CAUSES = {
    "stuck": "the meta-loss is at its limit",
    "blind": "no entry of the meta-gradient is finite",
    "idle": "the meta-gradient is zero, so the rule learns nothing,",
}


def _fatal_cause(limits: Limits, loss: float, weight_norm: float) -> str | None:
    if not np.isfinite(weight_norm):
        return "the rule's weights are no longer finite"
    if not np.isfinite(loss):
        return f"the meta-loss is {loss}"
    if weight_norm > limits.weight_norm:
        return f"the rule's weights have norm {weight_norm:.4g}, above {limits.weight_norm:g}"
    return None
