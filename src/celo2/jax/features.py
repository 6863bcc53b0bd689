"""The MLP's input: one tensor's gradient, parameter and moments as feature columns."""

import jax.numpy as jnp
from jax import Array, lax

from celo2.jax.moments import Axes, Moments

CLIP = 0.1
RMS_EPSILON = 1e-8
FACTORED_EPSILON = 1e-9


def build_features(axes: Axes, param: Array, grad: Array, moments: Moments) -> list[Array]:
    """The feature columns in the order of `celo2.rule.FEATURES`, not yet normalised.

    A column that is constant along an axis has length 1 there: row and column moments are never
    spread out over the tensor.
    """
    momentum, rms, rows, cols = moments.momentum, moments.rms, moments.rows, moments.cols
    inverse_rms = lax.rsqrt(rms + RMS_EPSILON)
    scales = factored_scales(axes, moments)
    columns = [
        grad,
        jnp.clip(grad, -CLIP, CLIP),
        param,
        *momentum,
        rms,
        *(m * inverse_rms for m in momentum),
        inverse_rms,
        *(grad * row * col for row, col in scales),
        grad * inverse_rms,
    ]
    if axes.matrix:
        columns += [
            *rows,
            *cols,
            *(lax.rsqrt(row + RMS_EPSILON) for row in rows),
            *(lax.rsqrt(col + RMS_EPSILON) for col in cols),
            *(m * row * col for m, (row, col) in zip(momentum, scales, strict=True)),
        ]
    return columns


def factored_scales(axes: Axes, moments: Moments) -> list[tuple[Array | float, Array]]:
    """For each decay the row and column factors whose product stands for 1/√second moment."""
    if not axes.matrix:
        return [(1.0, _floored_rsqrt(whole + FACTORED_EPSILON)) for whole in moments.rows]
    return [
        (
            _floored_rsqrt(row / (jnp.mean(row, axes.cols, keepdims=True) + FACTORED_EPSILON)),
            _floored_rsqrt(col),
        )
        for row, col in zip(moments.rows, moments.cols, strict=True)
    ]


def _floored_rsqrt(x: Array) -> Array:
    return lax.rsqrt(jnp.maximum(x, FACTORED_EPSILON))
