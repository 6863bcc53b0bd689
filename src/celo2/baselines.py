"""The optimizers that Celo2 is compared with, routed as Celo2 is."""

from typing import Any

import jax
import optax

from celo2.jax.optimizer import ScalarOrSchedule, route_all
from celo2.rule import CELO2

RMS = 0.2  # of Muon's updates: about AdamW's, so that one rate suits both ("Kimi scaling")


def adamw(
    schedule: optax.Schedule,
    *,
    weight_decay: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """AdamW with the decays that suit language models."""
    return optax.adamw(schedule, b1, b2, eps, weight_decay=weight_decay)


def muon(
    schedule: optax.Schedule,
    *,
    weight_decay: float = 0.0,
    adam_learning_rate: ScalarOrSchedule | None = None,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Muon on what Celo2's rule updates, in the same matrix views, and AdamW on the rest.

    AdamW has the same rate unless given one of its own; optax gives it Nesterov's momentum here.
    """
    return optax.contrib.muon(
        schedule,
        weight_decay=weight_decay,
        adam_b1=b1,
        adam_b2=b2,
        adam_eps_root=0.0,
        eps=eps,
        adam_weight_decay=weight_decay,
        adam_learning_rate=adam_learning_rate,
        consistent_rms=RMS,
        muon_weight_dimension_numbers=dimension_numbers,
    )


def dimension_numbers(params: Any) -> Any:
    """Muon's name for the matrix view of each hidden matrix; None for what AdamW updates."""
    return jax.tree.structure(params).unflatten(
        [
            optax.contrib.MuonDimensionNumbers(route.view.rows, route.view.columns)
            if route.updater == "rule"
            else None
            for route in route_all(params, CELO2)
        ]
    )
