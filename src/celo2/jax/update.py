"""From features to an update: the MLP, the update form, Newton–Schulz, the output norm."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from celo2.jax.features import Features, Plane, build_features, split_first_layer
from celo2.jax.moments import Moments, reduce_in_turn
from celo2.routing import MATRIX, Axes
from celo2.rule import (
    CANCELLATION_LIMIT,
    CLIP_RMS,
    EPSILON,
    FACTORED_FLOOR,
    MAGNITUDE_SCALE,
    NEWTON_SCHULZ,
    NEWTON_SCHULZ_EPSILON,
    NEWTON_SCHULZ_STEPS,
    OVERSHOOT_STEP,
    RuleConfig,
    cancellation_scale,
)

Weights = Mapping[str, Array]
Kernel = Literal["fused", "products"]

WIDEST_UNIT_BY_UNIT = 8  # hidden units of a layer; beyond, XLA's compile time explodes


def tensor_update(
    weights: Weights,
    config: RuleConfig,
    axes: Axes,
    param: Array,
    grad: Array,
    moments: Moments,
    *,
    newton_schulz_dtype: Any = None,
    kernel: Kernel = "fused",
) -> tuple[Array, Array]:
    """One viewed tensor's update and its new `running_rms` (Algorithm 1, steps 4 to 7).

    The moments include the gradient.
    """
    update = learned_update(weights, config, axes, param, grad, moments, kernel=kernel)
    overshoot, mean, moves = overshoot_of(config, moments), moments.running_rms, moments.moves
    return finish_update(
        config, axes, update, overshoot, mean, moves, newton_schulz_dtype=newton_schulz_dtype
    )


def learned_update(
    weights: Weights,
    config: RuleConfig,
    axes: Axes,
    param: Array,
    grad: Array,
    moments: Moments,
    *,
    kernel: Kernel = "fused",
) -> Array:
    """The MLP's output in its form: the update before orthogonalization and norm."""
    first_layer = split_first_layer(config, weights["w0"], axes.matrix)
    if config.gated:
        gates = split_first_layer(config, weights["g0"], axes.matrix)
        first_layer = open_gates(first_layer, gates, cancellation(config, moments))
    build = functools.partial(build_features, axes)
    direction, magnitude = run_mlp(
        weights, first_layer, normalize_inputs, build, (param, grad, moments), kernel
    )
    return FORMS[config.form](direction, magnitude)


def finish_update(
    config: RuleConfig,
    axes: Axes,
    update: Array,
    overshoot: Array | None,
    running_rms: Array,
    moves: Array,
    *,
    newton_schulz_dtype: Any = None,
) -> tuple[Array, Array]:
    """The update orthogonalized and scaled, and its new `running_rms`; for a stack, of each."""
    if config.orthogonalize and axes.matrix:
        update = newton_schulz(update, overshoot, dtype=newton_schulz_dtype)
    return NORMS[config.norm](update, running_rms, moves)


def run_mlp(
    weights: Weights,
    first_layer: list[Array],
    normalize: Callable[[list[Array], Features], list[Array]],
    build: Callable[..., Features],
    tensor: tuple[Any, ...],
    kernel: Kernel = "fused",
) -> tuple[Array, Array]:
    """The MLP's direction and magnitude on the features that `build` makes of `tensor`."""
    kernels = normalize(first_layer, build(*tensor))
    # The features are built a second time rather than kept: XLA would store ten planes of them.
    tensor, kernels = lax.optimization_barrier((tensor, kernels))
    return apply_mlp(weights, kernels, build(*tensor), kernel)


def cancellation(config: RuleConfig, moments: Moments) -> Array:
    """How much the gradients of successive steps cancel each other, (batch…, 1, 1).

    0 where they are independent or agree, 1.5 at most; see `cancellation_scale`.
    """
    momentum = moments.momentum[0].astype(jnp.float32)
    mean_square = _sum_of_squares(Plane(momentum)).sum(-1, keepdims=True) / _size(momentum, MATRIX)
    ratio = mean_square / (jnp.mean(moments.rows[0], MATRIX, keepdims=True) + FACTORED_FLOOR)
    offset, slope = cancellation_scale(config)
    return jnp.clip(offset + slope * jnp.log(ratio + EPSILON), 0.0, CANCELLATION_LIMIT)


def overshoot_of(config: RuleConfig, moments: Moments) -> Array | None:
    """The part of the second Newton–Schulz iterate that is subtracted, (batch…, 1, 1)."""
    if not config.overshoot:
        return None
    return cancellation(config, moments) * (config.overshoot / CANCELLATION_LIMIT)


def open_gates(parts: list[Array], gates: list[Array], cancellation: Array) -> list[Array]:
    """The first layer's parts for each slice, (columns, hidden units, batch…, 1, 1)."""
    ones = [1] * cancellation.ndim
    return [
        part.reshape(*part.shape, *ones)
        + gate.reshape(*gate.shape, *ones) * cancellation[None, None]
        for part, gate in zip(parts, gates, strict=True)
    ]


def normalize_inputs(
    parts: list[Array],
    features: Features,
    axes: tuple[int, ...] = MATRIX,
    epsilon: float = EPSILON,
) -> list[Array]:
    """The first layer's parts multiplied by each column's normaliser, 1/RMS over `axes`.

    `axes` include the last two. The parts are shared by all slices, or for each; they are returned
    as (columns, hidden units, batch…, 1, 1).
    """
    # Sums over one axis at a time: XLA has fast kernels for them on CPUs.
    planes = jnp.stack([_sum_of_squares(plane) for plane in features.planes])
    rest = tuple(axis for axis in axes if axis != -2)
    mean_squares = [jnp.sum(planes, rest, keepdims=True) / _size(features.planes[0].value, axes)]
    mean_squares += [jnp.mean(jnp.square(s), axes, keepdims=True) for s in features.stripes]
    kernels = []
    for part, mean_square in zip(parts, mean_squares, strict=True):
        part = part.reshape(*part.shape, *[1] * (mean_square.ndim + 1 - part.ndim))
        kernels.append(part * lax.rsqrt(mean_square + epsilon)[:, None])
    return kernels


def _sum_of_squares(plane: Plane) -> Array:
    """The sum of a plane's squares over its rows, (…, 1, columns).

    A factor that is the same for all rows is multiplied in afterwards.
    """
    late = [f for f in plane.factors if f.shape[-2] == 1]
    early = [f for f in plane.factors if f.shape[-2] != 1]
    total = jnp.sum(jnp.square(math.prod(early, start=plane.value)), -2, keepdims=True)
    return math.prod(map(jnp.square, late), start=total)


def _size(x: Array, axes: tuple[int, ...]) -> float:
    return float(math.prod(x.shape[a] for a in axes))  # as an integer it may not fit 32 bits


def apply_mlp(
    weights: Weights, kernels: list[Array], features: Features, kernel: Kernel
) -> tuple[Array, Array]:
    """The MLP's direction and magnitude.

    "fused" computes narrow layers unit by unit, each unit a plane of its own, so that XLA runs the
    whole MLP in one loop over the tensor. Compile time then grows with the product of all widths,
    so wider layers are always products of matrices, which contract the axis of units alone: no
    sharded axis is flattened.
    """
    planes = [math.prod(plane.factors, start=plane.value) for plane in features.planes]
    # Row and column features are weighted before they are broadcast.
    offsets = [
        jnp.sum(kernel * stripes[:, None], 0)
        for kernel, stripes in zip(kernels[1:], features.stripes, strict=True)
    ]
    layers = [(weights[f"w{i}"], weights[f"b{i}"]) for i in range(len(weights) // 2)]
    layers[-1] = layers[-1][0][:, :2], layers[-1][1][:2]  # the third output is not used
    widest = max(len(bias) for _, bias in layers)
    fused = kernel == "fused" and widest <= WIDEST_UNIT_BY_UNIT
    run = _unit_by_unit if fused else _by_products
    return run(planes, kernels[0], offsets, layers)


def _unit_by_unit(planes, kernel, offsets, layers) -> tuple[Array, Array]:
    units = [
        bias + _weighted_sum([column[h] for column in kernel], planes)
        for h, bias in enumerate(layers[0][1])
    ]
    for offset in offsets:
        units = [unit + offset[h] for h, unit in enumerate(units)]
    for weight, bias in layers[1:]:
        inputs = [jax.nn.relu(unit) for unit in units]
        units = [_weighted_sum(weight[:, h], inputs) + bias[h] for h in range(len(bias))]
    return units[0], units[1]


def _weighted_sum(weights: Sequence[Array] | Array, values: list[Array]) -> Array:
    total = weights[0] * values[0]
    for i in range(1, len(values)):
        total = total + weights[i] * values[i]
    return total


def _by_products(planes, kernel, offsets, layers) -> tuple[Array, Array]:
    # Accelerators would round the factors to fewer bits.
    einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    units = einsum("cu...,c...ij->u...ij", kernel[..., 0, 0], jnp.stack(planes))
    units = units + _per_unit(layers[0][1], units.ndim)
    for offset in offsets:
        units = units + offset
    for weight, bias in layers[1:]:
        units = einsum("uv,u...->v...", weight, jax.nn.relu(units)) + _per_unit(bias, units.ndim)
    return units[0], units[1]


def _per_unit(bias: Array, ndim: int) -> Array:
    return bias.reshape(-1, *[1] * (ndim - 1))


# Each takes the direction and the magnitude.
FORMS: dict[str, Callable[[Array, Array], Array]] = {
    "d": lambda d, m: d,
    "d_exp_m": lambda d, m: d * jnp.exp(MAGNITUDE_SCALE * m),
    "d_exp_m_avg": lambda d, m: d * jnp.exp(MAGNITUDE_SCALE * reduce_in_turn(jnp.mean, m, MATRIX)),
}


def newton_schulz(
    x: Array,
    overshoot: Array | None = None,
    *,
    steps: int = NEWTON_SCHULZ_STEPS,
    dtype: Any = None,
) -> Array:
    """Pushes the singular values of `x` towards 1, over its last two axes.

    Five steps leave most of them in [0.7, 1.2], and very small ones below: that is enough
    (Algorithm 1, step 6). An `overshoot`, (batch…, 1, 1), leaves large ones below small ones.
    """
    sharding = jax.typeof(x).sharding
    if any(sharding.spec):
        # With explicit axes every product needs an output sharding; here XLA chooses them.
        def free(arrays: tuple[Array, Array | None]) -> Array:
            return newton_schulz(*arrays, steps=steps, dtype=dtype)

        return jnp.asarray(jax.sharding.auto_axes(free, out_sharding=sharding)((x, overshoot)))
    # Transposed where rows > columns: the Gram matrix is then the smaller one.
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT, overshoot, steps=steps, dtype=dtype).mT
    norm = jnp.sqrt(reduce_in_turn(jnp.sum, jnp.square(x), MATRIX))
    y = (x / (norm + NEWTON_SCHULZ_EPSILON)).astype(dtype or x.dtype)
    overshoot = None if overshoot is None else overshoot.astype(y.dtype)
    a, b, c = NEWTON_SCHULZ
    if y.shape[-1] >= 2 * y.shape[-2]:
        y = _gram_polynomial(y @ y.mT, steps, overshoot) @ y
    else:
        early = y
        for step in range(1, steps + 1):
            gram = y @ y.mT
            y = a * y + (b * gram + c * (gram @ gram)) @ y
            early = y if step == OVERSHOOT_STEP else early
        y = y if overshoot is None else y - overshoot * early
    return y.astype(x.dtype)


def _gram_polynomial(gram: Array, steps: int, overshoot: Array | None) -> Array:
    """The matrix P for which P y is the result of `newton_schulz`, from gram = y yᵀ.

    The iterates are polynomials in the Gram matrix times y. For a wide y it is cheaper to multiply
    the small matrices and to use y only once more.
    """
    a, b, c = NEWTON_SCHULZ
    identity = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    identity = jnp.expand_dims(identity, tuple(range(gram.ndim - 2)))
    early = total = factor = a * identity + b * gram + c * (gram @ gram)
    for step in range(2, steps + 1):
        gram = factor @ gram @ factor
        factor = a * identity + b * gram + c * (gram @ gram)
        total = factor @ total
        early = total if step == OVERSHOOT_STEP else early
    return total if overshoot is None else total - overshoot * early


def rms(update: Array) -> Array:
    """The root mean square of each slice."""
    total = reduce_in_turn(jnp.sum, jnp.square(update), MATRIX)
    return jnp.sqrt(total / _size(update, MATRIX) + EPSILON)


def _mean_rms(update: Array, running_rms: Array, moves: Array) -> Array:
    """The mean RMS of all updates so far, this one included."""
    steps = jnp.maximum(moves, 1).astype(jnp.float32)
    return running_rms + (rms(update) - running_rms) / steps


def _rolling_norm(update: Array, running_rms: Array, moves: Array) -> tuple[Array, Array]:
    mean = _mean_rms(update, running_rms, moves)
    return update / mean, mean


def _rolling_norm_clip(update: Array, running_rms: Array, moves: Array) -> tuple[Array, Array]:
    mean = _mean_rms(update, running_rms, moves)
    return update * jnp.minimum(1.0, CLIP_RMS * mean / rms(update)), mean


# Each takes the update, the mean RMS of those before and their number with this one; it returns
# the scaled update and the new mean, which all but the rolling norms leave as it is.
NORMS: dict[str, Callable[[Array, Array, Array], tuple[Array, Array]]] = {
    "raw": lambda u, mean, moves: (u, mean),
    "norm": lambda u, mean, moves: (u / rms(u), mean),
    "norm_clip": lambda u, mean, moves: (u * jnp.minimum(1.0, CLIP_RMS / rms(u)), mean),
    "rolling_norm": _rolling_norm,
    "rolling_norm_clip": _rolling_norm_clip,
}
