"""What the rule remembers of a tensor's gradients, and how a new gradient changes it.

Every array here is in its matrix view, (batch…, in, out), where a vector is a single row; it keeps
the axes it was reduced over with length 1, so that all of them broadcast against the tensor.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from celo2.layout import MatrixView, factored_axes
from celo2.rule import RuleConfig

GRADIENT_LIMIT = 1000.0
FACTORED_FLOOR = 1e-30  # keeps a factored moment positive where squares underflow
LAST_COUNT = 2**31 - 1


MATRIX = (-2, -1)


class Axes(NamedTuple):
    """The axes of a viewed tensor that the rule treats specially, counted from the end."""

    matrix: bool  # False for scalars and vectors, whose second moments are not factored
    rows: tuple[int, ...]  # what row moments are averaged over: the largest axis
    cols: tuple[int, ...]  # what column moments are averaged over: the second largest axis
    fate: tuple[int, ...]  # what holds still or is skipped together


class Moments(NamedTuple):
    """The accumulators of one viewed tensor, or of a stack of tensors of one shape."""

    momentum: tuple[Array, ...]
    rms: Array
    rows: tuple[Array, ...]  # factored second moments; a vector keeps its whole one here
    cols: tuple[Array, ...]
    running_rms: Array  # mean RMS of the updates so far, for the rolling norms
    moves: Array  # steps in which the slice moved: 0 until its first non-zero gradient
    skipped: Array  # steps left out because the gradient was not finite


def axes_of(view: MatrixView, shape: tuple[int, ...]) -> Axes:
    """The axes of a tensor with this view and this viewed shape."""
    if view.is_vector:
        return Axes(False, (), MATRIX, MATRIX)
    d1, d0 = factored_axes(shape, view.published)
    return Axes(True, (d0,), (d1,), tuple(range(-len(shape), 0)) if view.published else MATRIX)


def init_moments(config: RuleConfig, axes: Axes, param: Array, momentum_dtype=None) -> Moments:
    """Zeros for a viewed tensor, placed as it is placed."""
    zeros = jnp.zeros_like(param, jnp.float32)
    row, col = (jnp.sum(zeros, a, keepdims=True) for a in (axes.rows, axes.cols))
    count = jnp.sum(zeros, axes.fate, keepdims=True).astype(jnp.int32)
    return Moments(
        momentum=tuple(
            jnp.zeros_like(zeros, momentum_dtype or jnp.float32) for _ in config.momentum_decays
        ),
        rms=zeros,
        rows=tuple(jnp.copy(row) for _ in config.factored_decays),
        cols=tuple(jnp.copy(col) for _ in config.factored_decays),
        running_rms=jnp.sum(zeros, MATRIX, keepdims=True),
        moves=count,
        skipped=jnp.copy(count),
    )


def update_moments(
    config: RuleConfig,
    axes: Axes,
    grad: Array,
    moments: Moments,
    *,
    skip_nonfinite: bool = True,
    hold_unused: bool = True,
) -> tuple[Array, Moments, Array]:
    """The clipped gradient, the new moments, and whether each slice moves.

    A slice whose gradient is not finite keeps its moments, and a slice that never had a non-zero
    gradient does not move; the published code does neither.
    """
    peak = reduce_in_turn(jnp.max, jnp.abs(grad), axes.fate)  # NaN and Inf come through
    finite = jnp.isfinite(peak) if skip_nonfinite else jnp.ones_like(peak, bool)
    moving = finite & ((moments.moves > 0) | (peak > 0)) if hold_unused else finite
    grad = jnp.clip(grad, -GRADIENT_LIMIT, GRADIENT_LIMIT)

    def decay(rate: float, old: Array, new: Array) -> Array:
        old = old.astype(jnp.float32)
        new = rate * old + (1 - rate) * new
        return jnp.where(finite, new, old) if skip_nonfinite else new

    square = jnp.square(grad)
    row, col = (jnp.mean(square + FACTORED_FLOOR, a, keepdims=True) for a in (axes.rows, axes.cols))
    new = Moments(
        tuple(map(lambda b, m: decay(b, m, grad), config.momentum_decays, moments.momentum)),
        decay(config.rms_decay, moments.rms, square),
        tuple(map(lambda b, r: decay(b, r, row), config.factored_decays, moments.rows)),
        tuple(map(lambda b, c: decay(b, c, col), config.factored_decays, moments.cols)),
        moments.running_rms,
        _count(moments.moves, moving),
        _count(moments.skipped, ~finite),
    )
    if skip_nonfinite:
        grad = jnp.where(finite, grad, 0.0)
    return grad, new, moving


def reduce_in_turn(reduce: Callable, x: Array, axes: tuple[int, ...]) -> Array:
    """`reduce` over several axes, one at a time and the last one last.

    XLA vectorises a reduction over a leading axis on CPUs, and one over all axes at once it
    does not: this takes a fifth off the whole rule.
    """
    for axis in axes:
        x = reduce(x, axis, keepdims=True)
    return x


def _count(count: Array, happened: Array) -> Array:
    return jnp.where(happened & (count < LAST_COUNT), count + 1, count)
