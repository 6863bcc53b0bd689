"""Tiny inner problems and rules for the tests of meta-training."""

import jax
import jax.numpy as jnp
from jax import Array

from celo2.metatrain.config import MetaConfig
from celo2.metatrain.families import EVERY_MATRIX, Family
from celo2.rule import RuleConfig
from rules import make_rule

RULE = RuleConfig(hidden=(4,), momentum_decays=(0.9,), factored_decays=(0.9,))
WEIGHTS = {name: jnp.asarray(w) for name, w in make_rule(RULE).weights.items()}


def tiny_config(**changes) -> MetaConfig:
    """A config of few problems and short unrolls, without augmentation."""
    fields = dict(
        rule=RULE,
        problems=1,
        truncation=2,
        unroll=(8, 8),
        sigma=0.01,
        inner_learning_rate=0.1,
        adam_multiplier=1.0,
        augmentation="none",
    )
    return MetaConfig(**(fields | changes))


def quadratic(
    config: MetaConfig | None = None,
    noise: float = 0.0,
    names: tuple[str, ...] = ("quadratic",),
) -> Family:
    """Half the mean squared distance of two matrices and a bias to a target.

    Without noise, every problem starts at the same place and all its batches are alike.
    """

    def init(key: Array) -> dict:
        def leaf(i: int, *shape: int) -> Array:
            fixed = jax.random.normal(jax.random.key(i), shape)
            return fixed + noise * jax.random.normal(jax.random.fold_in(key, i), shape)

        return {
            "hidden": {"kernel": leaf(0, 3, 4)},
            "head": {"kernel": leaf(1, 3, 4), "bias": leaf(2, 4)},
        }

    def sample(data, key: Array, index: Array) -> Array:
        return data[index] + noise * jax.random.normal(key)

    def loss(params, target: Array) -> Array:
        leaves = jax.tree.leaves(params)
        errors = [jnp.sum(jnp.square(leaf - target)) for leaf in leaves]
        return sum(errors) / (2 * sum(leaf.size for leaf in leaves))

    data = jnp.linspace(0.1, 0.2, len(names))
    return Family(names, init, sample, loss, data, EVERY_MATRIX, config or tiny_config())
