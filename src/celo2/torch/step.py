"""One step of the rule on many parameters; small ones of one shape go together."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from celo2.rule import RuleConfig
from celo2.torch.blocks import BLOCK, Extent, as_it_is
from celo2.torch.moments import Moments, update_moments
from celo2.torch.state import momentum_names, view_moments
from celo2.torch.tensors import Frame, from_view, local, to_view
from celo2.torch.update import Weights, tensor_update


class Job(NamedTuple):
    """A parameter to move."""

    param: Tensor
    grad: Tensor
    frame: Frame
    state: dict[str, Tensor]


class Options(NamedTuple):
    """The settings of a parameter group that the rule's step needs."""

    lr: float | Tensor
    weight_decay: float
    rms_scale: float
    skip_nonfinite: bool
    hold_unused: bool
    newton_schulz_dtype: torch.dtype | None
    foreach: bool | None
    compile: bool


def move(config: RuleConfig, weights: Weights, jobs: list[Job], options: Options) -> None:
    """Updates parameters and state of all jobs."""
    for batch in _batches(jobs, options.foreach is not False):
        if len(batch) == 1:
            _move_one(config, weights, batch[0], options)
        else:
            _move_stack(config, weights, batch, options)


def _batches(jobs: list[Job], together: bool) -> Iterator[list[Job]]:
    """The jobs one by one, but small ones of one kind in stacks no larger than a block."""
    kinds: dict[Any, list[Job]] = {}
    for i, job in enumerate(jobs):
        small = job.param.numel() * 2 <= BLOCK and job.frame.extent.shards is None
        kind = (job.frame, job.param.dtype, job.param.device) if small and together else i
        kinds.setdefault(kind, []).append(job)
    for members in kinds.values():
        size = max(1, BLOCK // max(1, members[0].param.numel()))
        for start in range(0, len(members), size):
            yield members[start : start + size]


def _move_one(config: RuleConfig, weights: Weights, job: Job, options: Options) -> None:
    view = job.frame.view
    param, grad = (to_view(local(x), view) for x in (job.param, job.grad))
    moments = view_moments(config, job.frame, job.state)
    update = _update(config, weights, job.frame, param, grad, moments, options)
    if not _shares_memory(moments, job.state):
        _store(config, job, moments)
    _descend([job], [update], options)


def _move_stack(config: RuleConfig, weights: Weights, batch: list[Job], options: Options) -> None:
    frame = batch[0].frame
    frame = frame._replace(extent=Extent((len(batch), *frame.extent.shape)))
    view = frame.view
    param, grad = (
        torch.stack([to_view(x, view) for x in xs])
        for xs in ([job.param for job in batch], [job.grad for job in batch])
    )
    own = [view_moments(config, job.frame, job.state) for job in batch]
    # Row and column moments have their decays in front, and the batch behind these.
    stacked = Moments(
        tuple(torch.stack(ms) for ms in zip(*(m.momentum for m in own), strict=True)),
        torch.stack([m.rms for m in own]),
        torch.stack([m.rows for m in own], 1),
        torch.stack([m.cols for m in own], 1),
        *(torch.stack([getattr(m, x) for m in own]) for x in ("running_rms", "moves", "skipped")),
    )
    update = _update(config, weights, frame, param, grad, stacked, options)
    for i, job in enumerate(batch):
        rows, cols = stacked.rows[:, i], stacked.cols[:, i]
        momentum = tuple(m[i] for m in stacked.momentum)
        rest = (x[i] for x in stacked[4:])
        _store(config, job, Moments(momentum, stacked.rms[i], rows, cols, *rest))
    _descend(batch, list(update), options)


def _update(
    config: RuleConfig,
    weights: Weights,
    frame: Frame,
    param: Tensor,
    grad: Tensor,
    moments: Moments,
    options: Options,
) -> Tensor:
    """What is subtracted from the viewed parameter, weight decay apart."""
    fuse = _compiled if options.compile else as_it_is
    finite, moving = update_moments(
        config,
        frame.axes,
        grad,
        moments,
        frame.extent,
        skip_nonfinite=options.skip_nonfinite,
        hold_unused=options.hold_unused,
        fuse=fuse,
    )
    update, scale, running_rms = tensor_update(
        config,
        weights,
        frame.axes,
        param,
        grad,
        finite,
        moments,
        frame.extent,
        options.newton_schulz_dtype,
        fuse,
    )
    moments.running_rms.copy_(running_rms.where(moving, moments.running_rms))
    scale = scale * (options.rms_scale * options.lr)
    return update.mul_(scale.where(moving, 0.0))


@functools.cache
def _compiled(function: Callable) -> Callable:
    # Dynamic shapes: one program for all matrices instead of one for each shape.
    return torch.compile(function, dynamic=True)


def _shares_memory(moments: Moments, state: dict[str, Tensor]) -> bool:
    """Whether the views of the large moments are the state itself."""
    stored = local(state["rms"])
    return moments.rms.numel() == 0 or moments.rms.data_ptr() == stored.data_ptr()


def _store(config: RuleConfig, job: Job, moments: Moments) -> None:
    """Writes moments that were worked on in a copy back to the state."""
    stored = view_moments(config, job.frame, job.state)
    large = (*momentum_names(config), "rms")
    for name, new in zip(large, (*moments.momentum, moments.rms), strict=True):
        old = local(job.state[name])
        old.copy_(from_view(new, job.frame.view, old.shape))
    for old, new in zip(stored[2:], moments[2:], strict=True):
        old.copy_(new)


def _descend(jobs: list[Job], updates: list[Tensor], options: Options) -> None:
    for job, update in zip(jobs, updates, strict=True):
        param = local(job.param)
        if options.weight_decay != 0:
            param.mul_(1 - options.lr * options.weight_decay)
        param.sub_(from_view(update, job.frame.view, param.shape))
