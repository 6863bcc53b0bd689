"""The rule's step on many parameters: equal ones go together, as many as a workspace allows."""

# pyright: reportPrivateImportUsage=false
# Torch has no public names for its foreach operations.

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from celo2.routing import Axes, MatrixView
from celo2.rule import RuleConfig
from celo2.torch.blocks import FLOAT, Plan, Stack, as_it_is, default_workspace
from celo2.torch.moments import store_moments, update_moments, view_moments
from celo2.torch.tensors import Frame, from_view, local, to_view
from celo2.torch.update import Weights, finish_update, tensor_update

# A product and a sum in one instruction: on a CPU the MLP takes a fifth less time.
COMPILER: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast"}
# An update and what Newton–Schulz makes beside it, in floats for each element.
UPDATE_FLOATS = 4


class Member(NamedTuple):
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
    maximize: bool
    workspace: int | None
    kernel: str | None
    compile: bool


def move(config: RuleConfig, weights: Weights, members: list[Member], options: Options) -> None:
    """Updates parameters and states of members that are on one device."""
    if options.compile:
        # With a square matrix first, a program is made for squares and then one for all.
        members = sorted(members, key=lambda one: len(set(one.frame.extent.shape)) == 1)
    for stack in _stacks(members, options):
        _move_stack(config, weights, stack, options)


def _stacks(members: list[Member], options: Options) -> Iterator[list[Member]]:
    """Members of one kind together, as many as have room for their updates."""
    kinds: dict[Any, list[Member]] = {}
    for i, member in enumerate(members):
        dtypes = member.param.dtype, member.grad.dtype, member.state["momentum_0"].dtype
        kind = i if options.foreach is False else (member.frame, dtypes)
        kinds.setdefault(kind, []).append(member)
    for some in kinds.values():
        param = local(some[0].param)
        workspace = options.workspace or default_workspace(param.device)
        size = max(1, workspace // (FLOAT * UPDATE_FLOATS * max(1, param.numel())))
        for start in range(0, len(some), size):
            yield some[start : start + size]


def _move_stack(
    config: RuleConfig, weights: Weights, members: list[Member], options: Options
) -> None:
    view, axes, extent = members[0].frame
    params = [local(member.param).detach() for member in members]
    grads = [local(member.grad) for member in members]
    if options.maximize:
        grads = torch._foreach_neg(grads)
    plan = Plan(
        extent._replace(shape=(len(members), *extent.shape)),
        options.workspace or default_workspace(params[0].device),
        options.skip_nonfinite,
        options.hold_unused,
        options.newton_schulz_dtype,
        _compiled if options.compile else as_it_is,
    )
    param, grad = (Stack([to_view(x, view) for x in xs]) for xs in (params, grads))
    states = [member.state for member in members]
    moments = view_moments(config, members[0].frame, states)
    arguments = weights, config, axes, param, grad, moments, plan
    if kernel := _find_kernel(options, *arguments[2:]):
        outputs, moving = kernel.triton_outputs(*arguments)
        update, running_rms = finish_update(config, axes, outputs, moments, plan)
    else:
        moving = update_moments(config, axes, grad, moments, plan)
        update, running_rms = tensor_update(*arguments)
    moments = moments._replace(running_rms=running_rms.where(moving, moments.running_rms))
    store_moments(config, members[0].frame, states, moments)
    descend(view, params, update, moving, options)


def _find_kernel(options: Options, axes: Axes, param: Stack, *others: Any) -> Any:
    """The module of the Triton kernels, where they were asked for or are at hand, or None."""
    by_default = options.kernel is None and param.members[0].is_cuda and not options.compile
    if options.kernel != "triton" and not by_default:
        return None
    if by_default and (importlib.util.find_spec("triton") is None or _is_fake(param.members[0])):
        return None
    from celo2.torch import kernel

    return kernel if kernel.can_run(axes, param, *others) else None


def _is_fake(x: Tensor) -> bool:
    """Whether a tensor has no memory that a kernel could work on."""
    return isinstance(x, FakeTensor) or torch.compiler.is_compiling()


def descend(
    view: MatrixView, params: list[Tensor], update: Tensor, moving: Tensor, options: Options
) -> None:
    """Moves parameters by a stack of updates: param ← (1 - lr · decay) param - lr · update."""
    size = options.rms_scale * options.lr
    update.mul_(torch.where(moving, size, 0.0))
    steps = [from_view(own, view, params[0].shape) for own in update.unbind(0)]
    if not options.weight_decay:
        torch._foreach_sub_(params, steps)
        return
    keep = 1 - options.lr * options.weight_decay
    if params[0].dtype.itemsize >= FLOAT:
        torch._foreach_mul_(params, keep)
        torch._foreach_sub_(params, steps)
        return
    # Rounded once: alone, a decay of less than half a unit in the last place is lost.
    moved = torch.stack(params).float().mul_(keep).sub_(torch.stack(steps))
    torch._foreach_copy_(params, list(moved.unbind(0)))


@functools.cache
def _compiled(function: Callable) -> Callable:
    # Dynamic shapes: one program for all matrices instead of one for each shape.
    known = torch._inductor.list_options()
    options = {name: value for name, value in COMPILER.items() if name in known}
    return torch.compile(function, dynamic=True, options=options)
