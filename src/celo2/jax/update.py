"""From features to an update: the MLP, the update form, Newton–Schulz, the output norm."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from celo2.jax.features import Features, Plane, build_features, split_first_layer
from celo2.jax.moments import Moments, reduce_in_turn
from celo2.routing import MATRIX, Axes
from celo2.rule import (
    CLIP_RMS,
    EPSILON,
    MAGNITUDE_SCALE,
    NEWTON_SCHULZ,
    NEWTON_SCHULZ_EPSILON,
    NEWTON_SCHULZ_STEPS,
    RuleConfig,
)

Weights = Mapping[str, Array]


def propose(
    config: RuleConfig, weights: Weights, axes: Axes, param: Array, grad: Array, moments: Moments
) -> Array:
    """What the MLP makes of one viewed tensor's features (Algorithm 1, steps 4 and 5)."""
    parts = split_first_layer(config, weights["w0"], axes.matrix)
    kernels = normalize_inputs(parts, build_features(axes, param, grad, moments))
    # The features are built a second time rather than kept: XLA would store ten planes of them.
    param, grad, moments, kernels = lax.optimization_barrier((param, grad, moments, kernels))
    outputs = apply_mlp(weights, kernels, build_features(axes, param, grad, moments))
    return FORMS[config.form](*outputs)


def settle(
    config: RuleConfig,
    axes: Axes,
    proposal: Array,
    moments: Moments,
    orthogonalize: Callable[[Array], Array],
) -> tuple[Array, Array]:
    """The update that comes of a proposal, and its new `running_rms` (Algorithm 1, steps 6, 7).

    A stack of proposals, with stacked moments, is settled as well.
    """
    if config.orthogonalize and axes.matrix:
        proposal = orthogonalize(proposal)
    return NORMS[config.norm](proposal, moments)


def normalize_inputs(parts: list[Array], features: Features) -> list[Array]:
    """The first layer's parts with each column's normaliser multiplied in.

    Each comes back as (columns, hidden units, batch…, 1, 1).
    """
    # Sums over one axis at a time: XLA has fast kernels for them on CPUs.
    planes = jnp.stack([_sum_of_squares(plane) for plane in features.planes])
    mean_squares = [jnp.sum(planes, -1, keepdims=True) / _matrix_size(features.planes[0].value)]
    mean_squares += [jnp.mean(jnp.square(s), MATRIX, keepdims=True) for s in features.stripes]
    kernels = []
    for part, mean_square in zip(parts, mean_squares, strict=True):
        part = part.reshape(*part.shape, *[1] * (mean_square.ndim - 1))
        kernels.append(part * lax.rsqrt(mean_square + EPSILON)[:, None])
    return kernels


def _sum_of_squares(plane: Plane) -> Array:
    """The sum of a plane's squares over its rows, (…, 1, columns).

    A factor that is the same for all rows is multiplied in afterwards.
    """
    late = [f for f in plane.factors if f.shape[-2] == 1]
    early = [f for f in plane.factors if f.shape[-2] != 1]
    total = jnp.sum(jnp.square(math.prod(early, start=plane.value)), -2, keepdims=True)
    return math.prod(map(jnp.square, late), start=total)


def _matrix_size(x: Array) -> int:
    return x.shape[-2] * x.shape[-1]


def apply_mlp(
    weights: Weights, kernels: list[Array], features: Features
) -> tuple[Array, Callable[[], Array]]:
    """The MLP's direction and, when called, its magnitude.

    Every hidden unit is a plane of its own, so that XLA runs the whole MLP in one loop over the
    tensor; row and column features are weighted before they are spread out.
    """
    planes = [math.prod(plane.factors, start=plane.value) for plane in features.planes]
    hidden = [
        bias + _weighted_sum([kernel[h] for kernel in kernels[0]], planes)
        for h, bias in enumerate(weights["b0"])
    ]
    for kernel, stripes in zip(kernels[1:], features.stripes, strict=True):
        weighted = jnp.sum(kernel * stripes[:, None], 0)
        hidden = [unit + weighted[h] for h, unit in enumerate(hidden)]

    depth = len(weights) // 2
    for layer in range(1, depth - 1):
        inputs = [jax.nn.relu(unit) for unit in hidden]
        hidden = [
            _neuron(weights, layer, inputs, unit) for unit in range(len(weights[f"b{layer}"]))
        ]
    inputs = [jax.nn.relu(unit) for unit in hidden]
    return _neuron(weights, depth - 1, inputs, 0), lambda: _neuron(weights, depth - 1, inputs, 1)


def _neuron(weights: Weights, layer: int, inputs: list[Array], unit: int) -> Array:
    return _weighted_sum(weights[f"w{layer}"][:, unit], inputs) + weights[f"b{layer}"][unit]


def _weighted_sum(weights: Sequence[Array] | Array, values: list[Array]) -> Array:
    total = weights[0] * values[0]
    for i in range(1, len(values)):
        total = total + weights[i] * values[i]
    return total


# Each takes the direction and a function that gives the magnitude.
FORMS: dict[str, Callable[[Array, Callable[[], Array]], Array]] = {
    "d": lambda d, m: d,
    "d_exp_m": lambda d, m: d * jnp.exp(MAGNITUDE_SCALE * m()),
    "d_exp_m_avg": lambda d, m: (
        d * jnp.exp(MAGNITUDE_SCALE * reduce_in_turn(jnp.mean, m(), MATRIX))
    ),
}


def newton_schulz(x: Array, steps: int = NEWTON_SCHULZ_STEPS, dtype: Any = None) -> Array:
    """Pushes the singular values of `x` towards 1, over its last two axes.

    Five steps leave most of them in [0.7, 1.2], and very small ones below: that is enough
    (Algorithm 1, step 6).
    """
    sharding = jax.typeof(x).sharding
    if any(sharding.spec):
        # Explicit axes ask for the sharding of every product; within, XLA chooses them.
        free = functools.partial(newton_schulz, steps=steps, dtype=dtype)
        return jnp.asarray(jax.sharding.auto_axes(free, out_sharding=sharding)(x))
    # Transposed where rows > columns: the Gram matrix is then the smaller one.
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT, steps, dtype).mT
    norm = jnp.sqrt(reduce_in_turn(jnp.sum, jnp.square(x), MATRIX))
    y = (x / (norm + NEWTON_SCHULZ_EPSILON)).astype(dtype or x.dtype)
    a, b, c = NEWTON_SCHULZ
    if y.shape[-1] >= 2 * y.shape[-2]:
        y = _gram_polynomial(y @ y.mT, steps) @ y
    else:
        for _ in range(steps):
            gram = y @ y.mT
            y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y.astype(x.dtype)


def _gram_polynomial(gram: Array, steps: int) -> Array:
    """The matrix that takes y to its last Newton–Schulz iterate, from gram = y yᵀ.

    The iterates are polynomials in the Gram matrix times y. For a wide y it is cheaper to
    multiply the small matrices and touch y only once more.
    """
    a, b, c = NEWTON_SCHULZ
    identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    identity = jnp.expand_dims(identity, tuple(range(gram.ndim - 2)))
    total = factor = a * identity + b * gram + c * (gram @ gram)
    for _ in range(steps - 1):
        gram = factor @ gram @ factor
        factor = a * identity + b * gram + c * (gram @ gram)
        total = factor @ total
    return total


def rms(update: Array) -> Array:
    """The root mean square of each slice."""
    total = reduce_in_turn(jnp.sum, jnp.square(update), MATRIX)
    return jnp.sqrt(total / _matrix_size(update) + EPSILON)


def _mean_rms(update: Array, moments: Moments) -> Array:
    """The mean RMS of all updates so far, this one included."""
    steps = jnp.maximum(moments.moves, 1).astype(jnp.float32)
    return moments.running_rms + (rms(update) - moments.running_rms) / steps


def _rolling_norm(update: Array, moments: Moments) -> tuple[Array, Array]:
    mean = _mean_rms(update, moments)
    return update / mean, mean


def _rolling_norm_clip(update: Array, moments: Moments) -> tuple[Array, Array]:
    mean = _mean_rms(update, moments)
    return update * jnp.minimum(1.0, CLIP_RMS * mean / rms(update)), mean


# Each takes the update and the moments, and returns the scaled update and the new
# `running_rms`, which all but the rolling norms leave as it is.
NORMS: dict[str, Callable[[Array, Moments], tuple[Array, Array]]] = {
    "raw": lambda u, moments: (u, moments.running_rms),
    "norm": lambda u, moments: (u / rms(u), moments.running_rms),
    "norm_clip": lambda u, moments: (
        u * jnp.minimum(1.0, CLIP_RMS / rms(u)),
        moments.running_rms,
    ),
    "rolling_norm": _rolling_norm,
    "rolling_norm_clip": _rolling_norm_clip,
}
