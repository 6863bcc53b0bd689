"""A multilayer perceptron for flat inputs."""

from collections.abc import Sequence

import jax
from jax import Array

from celo2.tasks.layers import dense, init_dense

SIZES = (64, 32, 10)  # the meta-training problem: 2,410 parameters


def init(key: Array, sizes: Sequence[int] = SIZES) -> dict:
    """Layers `layer_0` … and `head`: truncated normal with σ = 1/√fan_in, zero biases."""
    keys = jax.random.split(key, len(sizes) - 1)
    names = [*(f"layer_{i}" for i in range(len(sizes) - 2)), "head"]
    shapes = zip(sizes, sizes[1:], strict=False)
    return {name: init_dense(k, *shape) for name, k, shape in zip(names, keys, shapes, strict=True)}


def logits(params: dict, x: Array) -> Array:
    """[B, classes] from inputs [B, …], flattened; ReLU between layers."""
    x = x.reshape(len(x), -1)
    for i in range(len(params) - 1):
        x = jax.nn.relu(dense(params[f"layer_{i}"], x))
    return dense(params["head"], x)
