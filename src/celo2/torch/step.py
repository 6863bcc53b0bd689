"""One step of the rule on many parameters; small ones of one shape go together."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from celo2.routing import Axes, MatrixView
from celo2.rule import RuleConfig
from celo2.torch.blocks import BLOCK, Extent, Fuse, as_it_is
from celo2.torch.features import Inputs
from celo2.torch.moments import Moments, update_moments
from celo2.torch.state import momentum_names, view_moments
from celo2.torch.tensors import Frame, from_view, local, to_view
from celo2.torch.update import (
    NORMS,
    FirstLayer,
    Weights,
    normalize_inputs,
    rms,
    tensor_update,
)

# A product and a sum in one instruction: on a CPU the MLP takes a fifth less time.
COMPILER: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast"}


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


class Change(NamedTuple):
    """What a step does with an update: param ← keep · param - size · update."""

    size: float | Tensor
    keep: float | Tensor | None  # None: no weight decay

    def on(self, device: torch.device) -> "Change":
        """With tensors for numbers: a compiled program is made for one number only."""
        keep = None if self.keep is None else _as_tensor(self.keep, device)
        return Change(_as_tensor(self.size, device), keep)


def move(config: RuleConfig, weights: Weights, jobs: list[Job], options: Options) -> None:
    """Updates parameters and state of all jobs, which are on one device."""
    decay = options.weight_decay
    change = Change(options.rms_scale * options.lr, 1 - options.lr * decay if decay else None)
    if options.compile and jobs:
        change = change.on(jobs[0].param.device)
        # With a square matrix first, a program is made for squares and then one for all.
        jobs = sorted(jobs, key=lambda job: len(set(job.frame.extent.shape)) == 1)
    for batch in _batches(jobs, options.foreach is not False):
        if len(batch) == 1:
            _move_one(config, weights, batch[0], options, change)
        else:
            _move_stack(config, weights, batch, options, change)


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


def _move_one(
    config: RuleConfig, weights: Weights, job: Job, options: Options, change: Change
) -> None:
    frame = job.frame
    stored = local(job.param).detach()  # a Parameter would be compiled for its shape alone
    param, grad = (to_view(x, frame.view) for x in (stored, local(job.grad)))
    moments = view_moments(config, frame, job.state)
    update, moving = _update(config, weights, frame, param, grad, moments, options)
    fuse, _ = _fusing(options, frame.extent)
    fuse(descend)(config.norm, frame.view, frame.extent, [stored], update, moving, moments, change)
    if not _shares_memory(moments, job.state):
        _store(config, job, moments)


def _move_stack(
    config: RuleConfig, weights: Weights, batch: list[Job], options: Options, change: Change
) -> None:
    frame = batch[0].frame
    frame = frame._replace(extent=Extent((len(batch), *frame.extent.shape)))
    view = frame.view
    params = [job.param for job in batch]
    param, grad = (
        torch.stack([to_view(x, view) for x in xs]) for xs in (params, [job.grad for job in batch])
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
    update, moving = _update(config, weights, frame, param, grad, stacked, options)
    # Not fused: there would be a program for each number of parameters.
    descend(config.norm, view, frame.extent, params, update, moving, stacked, change)
    for i, job in enumerate(batch):
        rows, cols = stacked.rows[:, i], stacked.cols[:, i]
        momentum = tuple(m[i] for m in stacked.momentum)
        rest = (x[i] for x in stacked[4:])
        _store(config, job, Moments(momentum, stacked.rms[i], rows, cols, *rest))


def _update(
    config: RuleConfig,
    weights: Weights,
    frame: Frame,
    param: Tensor,
    grad: Tensor,
    moments: Moments,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """The viewed parameter's update before its norm, and which slices move."""
    axes, extent = frame.axes, frame.extent
    fuse, fuse_within = _fusing(options, extent)
    policies = options.skip_nonfinite, options.hold_unused
    finite, moving, layer = fuse(prepare)(
        config, weights, axes, param, grad, moments, extent, policies, fuse_within
    )
    inputs = Inputs(param, grad, finite, moments.rms, moments.momentum, layer.factors)
    fuse = _compiled if options.compile else as_it_is
    dtype = options.newton_schulz_dtype
    return tensor_update(config, weights, axes, inputs, layer, extent, dtype, fuse), moving


def prepare(
    config: RuleConfig,
    weights: Weights,
    axes: Axes,
    param: Tensor,
    grad: Tensor,
    moments: Moments,
    extent: Extent,
    policies: tuple[bool, bool],
    fuse: Fuse,
) -> tuple[Tensor, Tensor, FirstLayer]:
    """All that comes before the MLP: which slices are finite and move, and the first layer."""
    skip, hold = policies
    finite, moving = update_moments(
        config, axes, grad, moments, extent, skip_nonfinite=skip, hold_unused=hold, fuse=fuse
    )
    layer = normalize_inputs(config, weights, axes, param, grad, finite, moments, extent, fuse)
    return finite, moving, layer


def descend(
    norm: str,
    view: MatrixView,
    extent: Extent,
    params: list[Tensor],
    update: Tensor,
    moving: Tensor,
    moments: Moments,
    change: Change,
) -> None:
    """Normalises the update of one parameter, or of a stack, and moves the parameters by it."""
    update = update.float()
    scale, running_rms = NORMS[norm](rms(update, extent), moments)
    moments.running_rms.copy_(running_rms.where(moving, moments.running_rms))
    update.mul_((scale * change.size).where(moving, 0.0))
    for param, own in zip(params, update if len(params) > 1 else [update], strict=True):
        own = from_view(own, view, param.shape)
        if change.keep is None:
            param.sub_(own)
        elif param.dtype.itemsize < 4:
            # Rounded once: alone, a decay of less than half a unit in the last place is lost.
            param.copy_(param.float().mul_(change.keep).sub_(own))
        else:
            param.mul_(change.keep).sub_(own)


def _as_tensor(x: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(x, Tensor):
        return x
    return torch.full((), x, dtype=torch.float32, device=device)


def _fusing(options: Options, extent: Extent) -> tuple[Fuse, Fuse]:
    """What fuses whole stages, and what fuses the passes within them.

    Where processes add up their sums in a stage, only the passes between can be fused.
    """
    if not options.compile:
        return as_it_is, as_it_is
    return (_compiled, as_it_is) if extent.shards is None else (as_it_is, _compiled)


@functools.cache
def _compiled(function: Callable) -> Callable:
    # Dynamic shapes: one program for all matrices instead of one for each shape.
    known = torch._inductor.list_options()
    options = {name: value for name, value in COMPILER.items() if name in known}
    return torch.compile(function, dynamic=True, options=options)


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
