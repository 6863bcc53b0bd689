"""What the rule remembers of a tensor's gradients, and how a new gradient changes it.

Every array here is in its matrix view, (batch…, …, …) with the matrix last, where a vector is a
single row; it keeps the axes it was reduced over with length 1. All of them are updated in place.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from celo2.routing import MATRIX, Axes
from celo2.rule import FACTORED_FLOOR, GRADIENT_LIMIT, LAST_COUNT, RuleConfig
from celo2.torch.blocks import Extent, Fuse, as_it_is, blocks, part


class Moments(NamedTuple):
    """The accumulators of one viewed tensor, or of a stack of tensors of one shape."""

    momentum: tuple[Tensor, ...]
    rms: Tensor
    rows: Tensor  # factored second moments, (decays, …); a vector keeps its whole ones here
    cols: Tensor
    running_rms: Tensor  # mean RMS of the updates so far, for the rolling norms
    moves: Tensor  # steps in which the slice moved: 0 until its first non-zero gradient
    skipped: Tensor  # steps left out because the gradient was not finite


def small_shapes(config: RuleConfig, axes: Axes, shape: tuple[int, ...]) -> dict[str, tuple]:
    """The shapes of all accumulators that are smaller than a tensor of this viewed shape."""

    def reduced(over: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(1 if i - len(shape) in over else n for i, n in enumerate(shape))

    def stacked(over: tuple[int, ...]) -> tuple[int, ...]:
        return (len(config.factored_decays), *reduced(over))

    return {
        "rows": stacked(axes.rows),
        "cols": stacked(axes.cols),
        "running_rms": reduced(MATRIX),
        "moves": reduced(axes.slice),
        "skipped": reduced(axes.slice),
    }


def update_moments(
    config: RuleConfig,
    axes: Axes,
    grad: Tensor,
    moments: Moments,
    extent: Extent,
    *,
    skip_nonfinite: bool = True,
    hold_unused: bool = True,
    fuse: Fuse = as_it_is,
) -> tuple[Tensor, Tensor]:
    """Takes the gradient in; whether each slice's gradient is finite, and whether it moves.

    A slice whose gradient is not finite keeps its moments, and a slice that never had a non-zero
    gradient does not move; the published code does neither.
    """
    peak = extent.largest(_peak(grad, axes.slice), axes.slice)  # NaN and Inf come through
    finite = peak.isfinite() if skip_nonfinite else torch.ones_like(peak, dtype=torch.bool)
    moving = finite & ((moments.moves > 0) | (peak > 0)) if hold_unused else finite
    keep = finite.float()
    over = (axes.rows, axes.cols) if axes.matrix else (axes.rows,)
    factored = (moments.rows, moments.cols)[: len(over)]  # of a vector the column is not used
    if axes.matrix:
        # Whichever is the largest: one compiled loop serves both cases.
        over, factored = in_order(axes, *over), in_order(axes, *factored)
    means = [torch.zeros_like(x[0]) for x in factored]
    for block in blocks(grad.shape, whole=fuse is not as_it_is):
        large = (part(x, block) for x in (grad, finite, keep, moments.rms))
        momentum = [part(m, block) for m in moments.momentum]
        for mean, total in zip(means, fuse(absorb)(config, over, *large, momentum), strict=True):
            part(mean, block).add_(total)
    for axis, mean, old in zip(over, means, factored, strict=True):
        mean = extent.mean(mean, axis)
        for decay, moment in zip(config.factored_decays, old, strict=True):
            _decay(moment, mean, (1 - decay) * keep)
    _count(moments.moves, moving)
    _count(moments.skipped, ~finite)
    return finite, moving


def in_order(axes: Axes, rows: Any, cols: Any) -> tuple[Any, Any]:
    """What belongs to a matrix's rows and to its columns, in the order of the axes reduced."""
    return (rows, cols) if axes.rows[0] < axes.cols[0] else (cols, rows)


def absorb(
    config: RuleConfig,
    reductions: tuple[tuple[int, ...], ...],
    grad: Tensor,
    finite: Tensor,
    keep: Tensor,
    rms: Tensor,
    momentum: list[Tensor],
) -> list[Tensor]:
    """Takes a block of the gradient into the large moments; sums of its squares over axes."""
    grad = clean_gradient(grad, finite)
    for decay, old in zip(config.momentum_decays, momentum, strict=True):
        _decay(old, grad, (1 - decay) * keep)
    square = grad.square()
    _decay(rms, square, (1 - config.rms_decay) * keep)
    square = square + FACTORED_FLOOR
    return [square.sum(over, keepdim=True) if over else square for over in reductions]


def clean_gradient(grad: Tensor, finite: Tensor) -> Tensor:
    """The gradient in float32 within ±1000, so that no square overflows; 0 where not finite."""
    grad = grad.float().clamp(-GRADIENT_LIMIT, GRADIENT_LIMIT)
    return grad.where(finite, 0.0)


def _peak(grad: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The largest absolute value."""
    if grad.numel() == 0:  # an empty shard of a tensor that is not
        shape = [1 if i - grad.ndim in axes else n for i, n in enumerate(grad.shape)]
        return grad.new_zeros(shape, dtype=torch.float32)
    return torch.maximum(grad.amax(axes, True), -grad.amin(axes, True)).float()


def _decay(old: Tensor, new: Tensor, rate: Tensor) -> None:
    """old += rate (new - old), in place and in float32 however `old` is stored."""
    if old.dtype == new.dtype:
        old.lerp_(new, rate)
    else:
        old.copy_(old.float().lerp_(new, rate))


def _count(count: Tensor, happened: Tensor) -> None:
    count.add_(happened & (count < LAST_COUNT))
