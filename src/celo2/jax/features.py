"""The MLP's input: one tensor's gradient, parameter and moments as feature columns."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from celo2.jax.moments import Accumulators, Moments
from celo2.routing import Axes
from celo2.rule import CLIP, FACTORED_EPSILON, RMS_EPSILON, RuleConfig, feature_rows


class Plane(NamedTuple):
    """A column as large as the tensor: `value`, times `factors` that broadcast against it."""

    value: Array
    factors: tuple[Array, ...] = ()


class Features(NamedTuple):
    """All columns, not yet normalised, in the groups of `split_first_layer`."""

    planes: list[Plane]
    # Row and column features, (columns, …): constant along the largest or the second largest axis,
    # where they have length 1 and are never broadcast. A vector has none.
    stripes: tuple[Array, ...]


def build_features(
    axes: Axes,
    param: Array,
    grad: Array,
    moments: Moments | Accumulators,
    *,
    rms_epsilon: float = RMS_EPSILON,
) -> Features:
    """The features of one viewed tensor, in the order of `split_first_layer`."""
    momentum = [m.astype(jnp.float32) for m in moments.momentum]
    rms, rows, cols = moments.rms, moments.rows, moments.cols
    inverse_rms = lax.rsqrt(rms + rms_epsilon)
    scales = factored_scales(axes, rows, cols)
    planes = [
        Plane(grad),
        Plane(jnp.clip(grad, -CLIP, CLIP)),
        Plane(param),
        *map(Plane, momentum),
        Plane(rms),
        *(Plane(m * inverse_rms) for m in momentum),
        Plane(inverse_rms),
        *(Plane(grad, factors) for factors in scales),
        Plane(grad * inverse_rms),
    ]
    if not axes.matrix:
        return Features(planes, ())
    planes += map(Plane, momentum, scales)
    inverse_rows, inverse_cols = (lax.rsqrt(x + RMS_EPSILON) for x in (rows, cols))
    stripes = jnp.concatenate([rows, inverse_rows]), jnp.concatenate([cols, inverse_cols])
    return Features(planes, stripes)


def split_first_layer(config: RuleConfig, kernel: Array, matrix: bool) -> list[Array]:
    """The first layer's rows for the planes, for the rows and for the columns."""
    at = feature_rows(config)
    if not matrix:
        return [kernel[: at["row"].start]]
    momenta = kernel[at["factored_momentum"]]
    return [
        jnp.concatenate([kernel[: at["row"].start], momenta]),
        jnp.concatenate([kernel[at["row"]], kernel[at["inverse_row"]]]),
        jnp.concatenate([kernel[at["column"]], kernel[at["inverse_column"]]]),
    ]


def factored_scales(axes: Axes, rows: Array, cols: Array) -> list[tuple[Array, ...]]:
    """For each decay the factors whose product is about 1/√second moment."""
    if not axes.matrix:
        return [(scale,) for scale in _floored_rsqrt(rows + FACTORED_EPSILON)]
    row_scale = _floored_rsqrt(rows / (jnp.mean(rows, axes.cols, keepdims=True) + FACTORED_EPSILON))
    return list(zip(row_scale, _floored_rsqrt(cols), strict=True))


def _floored_rsqrt(x: Array) -> Array:
    return lax.rsqrt(jnp.maximum(x, FACTORED_EPSILON))
