"""Celo2 for JAX: an Optax transformation, and the optimizers built from it."""

from celo2.jax.alias import celo2, celo2_base
from celo2.jax.explain import explain
from celo2.jax.optimizer import Celo2State, scale_by_celo2

__all__ = ["Celo2State", "celo2", "celo2_base", "explain", "scale_by_celo2"]
