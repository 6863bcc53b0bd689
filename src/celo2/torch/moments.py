"""The accumulators that the rule keeps of a tensor's gradients, and their update.

A parameter's entry in the optimizer's state has plain tensors under names that stay the same. A
step works on the entries of a stack of equal parameters together, each in its matrix view
(batch…, ·, ·), where a vector is a single row; what was reduced over an axis keeps it with
length 1. All of it is updated in place.
"""

# pyright: reportPrivateImportUsage=false
# Torch has no public names for its foreach operations.

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from celo2.routing import MATRIX, Axes
from celo2.rule import FACTORED_FLOOR, GRADIENT_LIMIT, LAST_COUNT, RuleConfig
from celo2.torch.tensors import (
    Frame,
    Plan,
    Stack,
    Sums,
    from_view,
    is_view,
    local,
    part,
    put,
    take,
    to_view,
)

FLOAT32_MAX = torch.finfo(torch.float32).max

STATISTICS, COUNTS = ("rows", "cols", "running_rms"), ("moves", "skipped")
DECAYS_FIRST = ("rows", "cols")


class Moments(NamedTuple):
    """The accumulators of a stack of viewed tensors."""

    momentum: tuple[Stack, ...]
    rms: Stack
    rows: Tensor  # factored second moments, (decays, …); a vector keeps its whole ones here
    cols: Tensor
    running_rms: Tensor  # mean RMS of the updates so far, for the rolling norms
    # Two in front: `moves`, steps in which a slice moved, 0 until its first non-zero gradient, and
    # `skipped`, steps left out because the gradient was not finite.
    counts: Tensor

    @property
    def moves(self) -> Tensor:
        return self.counts.select(0, 0)


def momentum_names(config: RuleConfig) -> list[str]:
    return [f"momentum_{i}" for i in range(len(config.momentum_decays))]


def small_shapes(config: RuleConfig, axes: Axes, shape: tuple[int, ...]) -> dict[str, tuple]:
    """The shapes of all accumulators that are smaller than a tensor of this viewed shape."""

    def reduced(over: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(1 if i - len(shape) in over else n for i, n in enumerate(shape))

    shapes = {name: reduced(over) for name, over in _reduced(axes).items()}
    return shapes | {name: (len(config.factored_decays), *shapes[name]) for name in DECAYS_FIRST}


def _reduced(axes: Axes) -> dict[str, tuple[int, ...]]:
    """The axes that each small accumulator was reduced over."""
    counts = dict.fromkeys(COUNTS, axes.slice)
    return {"rows": axes.rows, "cols": axes.cols, "running_rms": MATRIX} | counts


def init_moments(
    config: RuleConfig, frame: Frame, param: Tensor, momentum_dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """A state of zeros: momenta and `rms` stored as the parameter is, the rest in its view."""
    dtypes = {name: momentum_dtype or torch.float32 for name in momentum_names(config)}
    state = {
        name: torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        for name, dtype in (dtypes | {"rms": torch.float32}).items()
    }
    shapes = small_shapes(config, frame.axes, frame.extent.shape)
    shards = frame.extent.shards
    own = small_shapes(config, frame.axes, tuple(to_view(local(param), frame.view).shape))
    for name, shape in shapes.items():
        dtype = torch.int32 if name in COUNTS else torch.float32
        zeros = torch.zeros(own[name], dtype=dtype, device=local(param).device)
        if shards is not None:
            zeros = shards.as_dtensor(zeros, shape, _reduced(frame.axes)[name])
        state[name] = zeros
    return state


def view_moments(config: RuleConfig, frame: Frame, states: Sequence[dict[str, Tensor]]) -> Moments:
    """This process's part of the states of equal parameters, viewed as one."""

    def large(name: str) -> Stack:
        return Stack([to_view(local(state[name]), frame.view) for state in states])

    small = {
        name: torch.stack([local(state[name]) for state in states], int(name in DECAYS_FIRST))
        for name in STATISTICS
    }
    counts = torch.stack([local(state[name]) for name in COUNTS for state in states])
    counts = counts.unflatten(0, (len(COUNTS), -1))
    return Moments(tuple(map(large, momentum_names(config))), large("rms"), **small, counts=counts)


def store_moments(
    config: RuleConfig, frame: Frame, states: Sequence[dict[str, Tensor]], moments: Moments
) -> None:
    """Writes to the states those moments that `view_moments` had to copy."""
    names = (*momentum_names(config), "rms")
    for name, stack in zip(names, (*moments.momentum, moments.rms), strict=True):
        for state, new in zip(states, stack.members, strict=True):
            old = local(state[name])
            if not is_view(old, frame.view):
                old.copy_(from_view(new, frame.view, old.shape))
    small = [getattr(moments, name).unbind(int(name in DECAYS_FIRST)) for name in STATISTICS]
    for names, new in ((STATISTICS, small), (COUNTS, map(Tensor.unbind, moments.counts))):
        # Together where they have one dtype.
        old = [local(state[name]) for name in names for state in states]
        torch._foreach_copy_(old, [x for some in new for x in some])


def update_moments(
    config: RuleConfig, axes: Axes, grad: Stack, moments: Moments, plan: Plan
) -> Tensor:
    """Updates the moments with the gradients; returns which slices move.

    A slice whose gradient is not finite keeps its moments, and a slice that never had a non-zero
    gradient does not move. The published code has neither exception.
    """
    peak = plan.extent.largest(find_peak(grad, axes.slice, plan), axes.slice)
    finite, moving = find_moving(peak, moments, plan)
    rates = find_rates(config, finite)
    over = in_order(axes, axes.rows, axes.cols) if axes.matrix else (axes.rows,)
    factored = in_order(axes, moments.rows, moments.cols) if axes.matrix else (moments.rows,)
    large = (*moments.momentum, moments.rms)
    absorbing = plan.fuse(absorb)
    sums = [Sums() for _ in over]
    for block in plan.blocks(grad.shape, len(large) + 4):
        own, *old = take((grad, *large), block)
        decays = (*config.momentum_decays, config.rms_decay)
        own_rates = [part(rates[decay], block) for decay in decays]
        totals = absorbing(over, plan.skip_nonfinite, own, old, own_rates)
        for sum_, total, like in zip(sums, totals, factored, strict=True):
            sum_.add(block, total, like.shape[1:])
        put(large, block, old)
    update_factored(config, axes, [sum_.total for sum_ in sums], rates, moments, plan)
    count_moves(moments, moving, finite)
    return moving


def find_moving(peak: Tensor, moments: Moments, plan: Plan) -> tuple[Tensor, Tensor]:
    """Which slices have finite gradients, and which move; `peak` is from `find_peak`."""
    finite = peak < torch.inf if plan.skip_nonfinite else torch.ones_like(peak, dtype=torch.bool)
    if not plan.hold_unused:
        return finite, finite
    return finite, finite & ((moments.moves > 0) | (peak > 0))


def find_rates(config: RuleConfig, finite: Tensor) -> dict[float, Tensor]:
    """The weight of the gradient in each moment, by decay: 0 for slices that are not finite."""
    decays = {*config.momentum_decays, config.rms_decay, *config.factored_decays}
    finite = finite.float()  # whatever the default dtype is
    return {decay: (1 - decay) * finite for decay in decays}


def update_factored(
    config: RuleConfig,
    axes: Axes,
    sums: Sequence[Tensor],
    rates: Mapping[float, Tensor],
    moments: Moments,
    plan: Plan,
) -> None:
    """Updates rows and cols with sums of squared gradients, one for each axis summed over."""
    over = in_order(axes, axes.rows, axes.cols) if axes.matrix else (axes.rows,)
    factored = in_order(axes, moments.rows, moments.cols) if axes.matrix else (moments.rows,)
    for axis, total, old in zip(over, sums, factored, strict=True):
        mean = plan.extent.mean(total, axis) + FACTORED_FLOOR
        for decay, moment in zip(config.factored_decays, old, strict=True):
            moment.lerp_(mean, rates[decay])


def count_moves(moments: Moments, moving: Tensor, finite: Tensor) -> None:
    happened = torch.stack([moving, finite.logical_not()])
    moments.counts.add_(happened & (moments.counts < LAST_COUNT))


def in_order(axes: Axes, rows: Any, cols: Any) -> tuple[Any, Any]:
    """`rows` and `cols` in the order of the axes that they are reduced over."""
    return (rows, cols) if axes.rows[0] < axes.cols[0] else (cols, rows)


def absorb(
    reductions: tuple[tuple[int, ...], ...],
    skip_nonfinite: bool,
    grad: Tensor,
    moments: list[Tensor],
    rates: list[Tensor],
) -> list[Tensor]:
    """Updates momenta and `rms` with a block of gradients; returns sums of squares over axes."""
    grad = clean_gradient(grad, skip_nonfinite)
    for old, rate in zip(moments[:-1], rates, strict=False):
        _decay(old, grad, rate)
    square = grad.square()
    _decay(moments[-1], square, rates[-1])
    return [square.sum(over, keepdim=True) if over else square for over in reductions]


def clean_gradient(grad: Tensor, skip_nonfinite: bool, out: Tensor | None = None) -> Tensor:
    """The gradient in float32 within ±1000, so that no square overflows.

    Where slices that are not finite are skipped, NaN becomes 0, since 0 · NaN is NaN.
    """
    grad = torch.clamp(grad.float(), -GRADIENT_LIMIT, GRADIENT_LIMIT, out=out)
    return grad.nan_to_num_(0.0) if skip_nonfinite else grad


def find_peak(grad: Stack, axes: tuple[int, ...], plan: Plan) -> Tensor:
    """The largest absolute value over axes; infinite or NaN where an element is."""
    ndim = len(grad.shape)
    shape = [1 if i - ndim in axes else n for i, n in enumerate(grad.shape)]
    first = grad.members[0]
    if first.numel() == 0:  # an empty shard of a tensor that is not
        return torch.zeros(shape, dtype=torch.float32, device=first.device)
    peak = Sums(torch.maximum)
    for block in plan.blocks(grad.shape, 8):
        (cut,) = take((grad,), block)
        largest = cut.abs().amax(axes, True)
        if largest.dtype == torch.float64:  # what is finite stays so in float32
            largest = torch.where(largest < torch.inf, largest.clamp(max=FLOAT32_MAX), largest)
        peak.add(block, largest.float(), shape)
    return peak.total


def _decay(old: Tensor, new: Tensor, rate: Tensor) -> None:
    """old += rate (new - old), in place and in float32 however `old` is stored."""
    if old.dtype == new.dtype:
        old.lerp_(new, rate)
    else:
        torch._foreach_copy_([old], [old.float().lerp_(new, rate)])
