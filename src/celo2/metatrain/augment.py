"""Task augmentation: the same function of rescaled parameters, hence another conditioning."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from celo2.metatrain.config import Augmentation


def sample_scales(
    level: Augmentation, bounds: tuple[float, float], key: Array, params
) -> jax.typing.ArrayLike:
    """A tree of scales for `params`, log-uniform in `bounds`, one for each unit of the level."""
    leaves, treedef = jax.tree.flatten(params)
    low, high = map(math.log, bounds)

    def draw(key: Array, shape: tuple[int, ...]) -> Array:
        return jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))

    if level == "none":
        scales = [jnp.ones(())] * len(leaves)
    elif level == "global":
        scales = [draw(key, ())] * len(leaves)
    else:
        keys = jax.random.split(key, len(leaves))
        shapes = [leaf.shape if level == "parameter" else () for leaf in leaves]
        scales = list(map(draw, keys, shapes))
    return treedef.unflatten(scales)


def shrink(params, scales):
    """The parameters to train: the task's own divided by the scales."""
    return jax.tree.map(lambda p, s: p / s, params, scales)


def expand(params, scales):
    """The parameters the task sees: those trained, times the scales."""
    return jax.tree.map(lambda p, s: p * s, params, scales)
