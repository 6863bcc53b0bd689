"""Celo2 for JAX, an Optax transformation and the optimizers built from it; VeLO and Celo."""

from celo2.jax.lstm_optimizers import LstmState, celo, velo
from celo2.jax.optimizer import (
    Celo2State,
    Skipped,
    celo2,
    celo2_base,
    explain,
    scale_by_celo2,
    skipped,
)

__all__ = [
    "Celo2State",
    "LstmState",
    "Skipped",
    "celo",
    "celo2",
    "celo2_base",
    "explain",
    "scale_by_celo2",
    "skipped",
    "velo",
]
