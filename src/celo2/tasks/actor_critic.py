"""A policy and a value function for flat observations, as two separate small networks."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from celo2.tasks.layers import dense

Activation = Literal["tanh", "relu"]
ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {"tanh": jnp.tanh, "relu": jax.nn.relu}

POLICY_GAIN = 0.01  # small, so that the first policy is nearly uniform
VALUE_GAIN = 1.0


def init(key: Array, inputs: int, actions: int, hidden: Sequence[int] = (64, 64)) -> dict:
    """`actor` with a `policy_head`, `critic` with a `value_head`: orthogonal, zero biases."""
    actor_key, critic_key = jax.random.split(key)
    return {
        "actor": _init_network(actor_key, inputs, hidden, "policy_head", actions, POLICY_GAIN),
        "critic": _init_network(critic_key, inputs, hidden, "value_head", 1, VALUE_GAIN),
    }


def logits(params: dict, x: Array, activation: Activation = "tanh") -> Array:
    """[B, actions] from observations [B, inputs]."""
    return dense(params["actor"]["policy_head"], _hidden(params["actor"], x, activation))


def value(params: dict, x: Array, activation: Activation = "tanh") -> Array:
    """[B]: the discounted reward expected from observations [B, inputs]."""
    return dense(params["critic"]["value_head"], _hidden(params["critic"], x, activation))[:, 0]


def log_probability(logits: Array, actions: Array) -> Array:
    """[B]: the logarithm of the chosen actions' probability."""
    # One-hot, not a gather: the gradient of a gather is a scatter, which is slow on CPUs.
    chosen = jax.nn.one_hot(actions, logits.shape[-1])
    return jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1)


def entropy(logits: Array) -> Array:
    """[B]: the policies' entropy in nats."""
    return -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=-1)


@partial(jax.jit, static_argnums=(1, 2))  # one compilation per shape, as in layers.py
def orthogonal(key: Array, shape: tuple[int, int], gain: float) -> Array:
    """A kernel (in, out) whose singular values are all `gain`."""
    return jax.nn.initializers.orthogonal(gain)(key, shape)


def _init_network(
    key: Array, inputs: int, hidden: Sequence[int], head: str, outputs: int, gain: float
) -> dict:
    keys = jax.random.split(key, len(hidden) + 1)
    names = [*(f"layer_{i}" for i in range(len(hidden))), head]
    gains = [*(math.sqrt(2.0) for _ in hidden), gain]
    shapes = zip((inputs, *hidden), (*hidden, outputs), strict=True)
    return {
        name: {"kernel": orthogonal(k, shape, g), "bias": jnp.zeros(shape[1])}
        for name, k, shape, g in zip(names, keys, shapes, gains, strict=True)
    }


def _hidden(network: dict, x: Array, activation: Activation) -> Array:
    for i in range(len(network) - 1):
        x = ACTIVATIONS[activation](dense(network[f"layer_{i}"], x))
    return x
