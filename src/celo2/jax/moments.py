"""The accumulators that the rule keeps of a tensor's gradients, and their update.

Every array here is in its matrix view, (batch…, in, out), where a vector is a single row; it keeps
the axes it was reduced over with length 1, so that all of them broadcast against the tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from celo2.routing import MATRIX, Axes
from celo2.rule import FACTORED_FLOOR, GRADIENT_LIMIT, LAST_COUNT, RuleConfig


class Accumulators(NamedTuple):
    """Running means over a viewed tensor's gradients and their squares."""

    momentum: tuple[Array, ...]
    rms: Array
    rows: Array  # factored second moments, (decays, …); a vector keeps its whole ones here
    cols: Array


class Moments(NamedTuple):
    """All the rule keeps of one viewed tensor, or of a stack of tensors of one shape."""

    momentum: tuple[Array, ...]  # these four are its Accumulators
    rms: Array
    rows: Array
    cols: Array
    running_rms: Array  # mean RMS of the updates so far, for the rolling norms
    moves: Array  # steps in which the slice moved: 0 until its first non-zero gradient
    skipped: Array  # steps left out because the gradient was not finite


Kept = TypeVar("Kept", Accumulators, Moments)


def init_moments(
    config: RuleConfig, axes: Axes, zeros: Array, momentum_dtype: Any = None
) -> Moments:
    """The first moments of a viewed tensor, from float32 zeros of its shape and sharding."""
    count = jnp.sum(zeros, axes.slice, keepdims=True).astype(jnp.int32)
    return Moments(
        *init_accumulators(config, axes, zeros, momentum_dtype),
        running_rms=jnp.sum(zeros, MATRIX, keepdims=True),
        moves=count,
        skipped=jnp.copy(count),
    )


def init_accumulators(
    config: RuleConfig, axes: Axes, zeros: Array, momentum_dtype: Any = None
) -> Accumulators:
    """The first accumulators of a viewed tensor, from float32 zeros of its shape and sharding."""
    decays = len(config.factored_decays)
    rows, cols = (
        jnp.stack([jnp.sum(zeros, a, keepdims=True)] * decays) for a in (axes.rows, axes.cols)
    )
    momentum = (
        jnp.zeros_like(zeros, momentum_dtype or jnp.float32) for _ in config.momentum_decays
    )
    return Accumulators(tuple(momentum), zeros, rows, cols)


def update_moments(
    config: RuleConfig,
    axes: Axes,
    grad: Array,
    moments: Moments,
    *,
    skip_nonfinite: bool = True,
    hold_unused: bool = True,
) -> tuple[Moments, Array]:
    """The new moments, and whether each slice moves.

    A slice whose gradient is not finite keeps its moments, and a slice that never had a non-zero
    gradient does not move. The published code has neither exception.
    """
    if grad.size == 0:
        return moments, moments.moves > 0
    peak = reduce_in_turn(jnp.max, jnp.abs(grad), axes.slice)  # NaN and Inf come through
    finite = jnp.isfinite(peak) if skip_nonfinite else jnp.ones_like(peak, bool)
    moving = finite & ((moments.moves > 0) | (peak > 0)) if hold_unused else finite
    new = Moments(
        *accumulate(config, axes, clip_gradient(grad), Accumulators(*moments[:4]), finite),
        running_rms=moments.running_rms,
        moves=_count(moments.moves, moving),
        skipped=_count(moments.skipped, ~finite),
    )
    return new, moving


def accumulate(
    config: RuleConfig, axes: Axes, grad: Array, old: Accumulators, finite: Array | None = None
) -> Accumulators:
    """The accumulators updated with a clipped gradient, where `finite`; None is everywhere."""
    finite = jnp.ones([1] * grad.ndim, bool) if finite is None else finite
    square = jnp.square(grad)
    row, col = (jnp.mean(square + FACTORED_FLOOR, a, keepdims=True) for a in (axes.rows, axes.cols))
    rates = jnp.asarray(config.factored_decays, jnp.float32).reshape(-1, *[1] * grad.ndim)
    return Accumulators(
        tuple(
            _decay(b, m, grad, finite).astype(m.dtype)
            for b, m in zip(config.momentum_decays, old.momentum, strict=True)
        ),
        _decay(config.rms_decay, old.rms, square, finite),
        _decay(rates, old.rows, row[None], finite[None]),
        _decay(rates, old.cols, col[None], finite[None]),
    )


def map_large(function: Callable[[Array], Array], moments: Kept) -> Kept:
    """The moments with `function` applied to the arrays that are as large as the tensor."""
    return moments._replace(
        momentum=tuple(map(function, moments.momentum)), rms=function(moments.rms)
    )


def as_trees(
    kind: type[Kept], treedef: Any, leaves: Sequence[Kept], decays: int
) -> tuple[Any, ...]:
    """One tree for each field of the leaves' moments; for `momentum`, one tree per decay."""
    momentum = tuple(treedef.unflatten(leaf.momentum[i] for leaf in leaves) for i in range(decays))
    rest = (
        treedef.unflatten(getattr(leaf, field) for leaf in leaves) for field in kind._fields[1:]
    )
    return momentum, *rest


def as_leaves(kind: type[Kept], trees: Sequence[Any]) -> list[Kept]:
    """The moments of each leaf: the inverse of `as_trees`."""
    momentum = list(zip(*map(jax.tree.leaves, trees[0]), strict=True))
    rest = map(jax.tree.leaves, trees[1:])
    return [kind(*leaf) for leaf in zip(momentum, *rest, strict=True)]


def clip_gradient(grad: Array) -> Array:
    """The gradient within ±1000, so that no square overflows."""
    return jnp.clip(grad, -GRADIENT_LIMIT, GRADIENT_LIMIT)


def _decay(rate: float | Array, old: Array, new: Array, finite: Array) -> Array:
    old = old.astype(jnp.float32)
    return jnp.where(finite, rate * old + (1 - rate) * new, old)


def reduce_in_turn(reduce: Callable, x: Array, axes: tuple[int, ...]) -> Array:
    """`reduce` over several axes, one at a time and the last one last.

    On CPUs this is faster than one reduction over all of them.
    """
    for axis in axes:
        x = reduce(x, axis, keepdims=True)
    return x


def _count(count: Array, happened: Array) -> Array:
    return jnp.where(happened & (count < LAST_COUNT), count + 1, count)
