"""Initialisers, layers and losses shared by the models."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

CHOP = 2.0  # standard deviations at which initial weights are cut

# The initialisers are compiled, so that a model's init, called as it is, compiles each shape once.
# A `jit` around the whole init would compile the random draws of every layer anew.


@partial(jax.jit, static_argnums=(1, 2))
def truncated_normal(key: Array, shape: tuple[int, ...], gain: float = 1.0) -> Array:
    """A kernel (…, in, out) from a normal cut at ±2, times gain/√fan_in.

    The cut is not made good for: the standard deviation is 0.88 · gain/√fan_in.
    """
    fan_in = math.prod(shape[:-1])
    return jax.random.truncated_normal(key, -CHOP, CHOP, shape) * (gain / math.sqrt(fan_in))


@partial(jax.jit, static_argnums=1)
def xavier_uniform(key: Array, shape: tuple[int, int]) -> Array:
    """A kernel (in, out), uniform with variance 2 / (in + out)."""
    bound = math.sqrt(6.0 / sum(shape))
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


@partial(jax.jit, static_argnums=(1, 2))
def normal(key: Array, shape: tuple[int, ...], scale: float) -> Array:
    """A table from a normal of standard deviation `scale`."""
    return jax.random.normal(key, shape) * scale


def init_dense(key: Array, fan_in: int, fan_out: int) -> dict[str, Array]:
    """A truncated-normal kernel and a zero bias."""
    return {"kernel": truncated_normal(key, (fan_in, fan_out)), "bias": jnp.zeros(fan_out)}


def dense(params: dict[str, Array], x: Array) -> Array:
    """`x @ kernel + bias`."""
    return x @ params["kernel"] + along_last_axis(params["bias"], x)


def along_last_axis(vector: Array, x: Array) -> Array:
    """The vector with leading axes of length one, as many as `x` needs."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


DATA_AXIS = "data"  # of a mesh, along which the examples of a batch are spread


def rms_norm(x: Array, axes: tuple[int, ...] = (-1,)) -> Array:
    """`x` divided by its root mean square over `axes`."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axes, keepdims=True) + 1e-6)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The mean negative log-likelihood of the labels, in nats."""
    logits = logits.astype(jnp.float32)
    # One-hot, not a gather: the gradient of a gather is a scatter, which is slow on CPUs.
    chosen = jnp.sum(logits * jax.nn.one_hot(labels, logits.shape[-1]), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def accuracy(logits: Array, labels: Array) -> Array:
    """The fraction of rows whose largest logit is the label's."""
    hits = jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels
    return jnp.mean(hits.astype(jnp.float32))


def spread_examples(x: Array) -> Array:
    """Examples along the first axis, spread over the data axis of the mesh that is set, if one is.

    A table that is cut along its width would otherwise make XLA cut what is read from it in the
    same way, and have every device compute the whole batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if kinds.get(DATA_AXIS) != AxisType.Auto or x.shape[0] % mesh.shape[DATA_AXIS]:
        return x
    rest = [P.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, P(DATA_AXIS, *rest))
