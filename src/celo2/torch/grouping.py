"""Steps of many parameters by the rule or AdamW, equal ones batched as the workspace allows."""

# pyright: reportPrivateImportUsage=false
# Torch has no public names for its foreach operations.

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from celo2.routing import Axes, MatrixView
from celo2.rule import ADAM_GRADIENT_LIMIT, LAST_COUNT, RuleConfig
from celo2.torch.moments import Moments, find_peak, store_moments, update_moments, view_moments
from celo2.torch.tensors import (
    FLOAT,
    Extent,
    Frame,
    Plan,
    Stack,
    as_it_is,
    default_workspace,
    from_view,
    local,
    part,
    put,
    take,
    to_view,
)
from celo2.torch.update import Weights, finish_update, tensor_update

# A product and a sum in one instruction: on a CPU the MLP takes a fifth less time.
COMPILER: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast"}
# An update and the temporaries of Newton–Schulz, in floats for each element.
UPDATE_FLOATS = 4

Group = dict[str, Any]  # the settings of a parameter group
Rate = float | Tensor


class Member(NamedTuple):
    """A parameter to move."""

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    frame: Any = None  # a Frame, where the rule moves it
    factor: float = 1.0  # on the update


def _group_equal(members: list[Member], foreach: bool | None) -> Iterable[list[Member]]:
    """Groups of members that can be stepped together."""
    kinds: dict[Any, list[Member]] = {}
    for i, (param, grad, state, frame, factor) in enumerate(members):
        dtypes = param.dtype, grad.dtype, *(x.dtype for x in state.values())
        kind = frame or local(param).shape, factor, param.device, dtypes
        kinds.setdefault(i if foreach is False else kind, []).append(members[i])
    return kinds.values()


def move_by_rule(
    group: Group,
    lr: Rate,
    config: RuleConfig,
    weights: Weights,
    members: list[Member],
    compile: bool,
) -> None:
    """Updates the parameters and states of members on one device by the rule."""
    if compile:
        # With a square matrix first, a program is made for squares and then one for all.
        members = sorted(members, key=lambda one: len(set(one.frame.extent.shape)) == 1)
    largest = max((local(member.param) for member in members), key=Tensor.numel)
    workspace = group["workspace"] or default_workspace(largest)
    plan = Plan(
        Extent(()),  # of each stack
        workspace,
        group["skip_nonfinite"],
        group["hold_unused"],
        group["newton_schulz_dtype"],
        _compiled if compile else as_it_is,
    )
    for some in _group_equal(members, group["foreach"]):
        # As many as the workspace holds updates for.
        numel = max(1, local(some[0].param).numel())
        size = max(1, workspace // (FLOAT * UPDATE_FLOATS * numel))
        for start in range(0, len(some), size):
            _move_stack_by_rule(group, lr, config, weights, some[start : start + size], plan)


def _move_stack_by_rule(
    group: Group,
    lr: Rate,
    config: RuleConfig,
    weights: Weights,
    members: list[Member],
    plan: Plan,
) -> None:
    frame: Frame = members[0].frame
    view, axes, extent = frame
    plan = plan._replace(extent=extent._replace(shape=(len(members), *extent.shape)))
    params, grads = _parts(group, members)
    param, grad = (Stack([to_view(x, view) for x in xs]) for xs in (params, grads))
    states = [member.state for member in members]
    moments = view_moments(config, frame, states)
    if kernel := _find_kernel(group["kernel"], axes, param, grad, moments, plan):
        outputs, cancelled, moving = kernel.triton_outputs(
            weights, config, axes, param, grad, moments, plan
        )
        update, running_rms = finish_update(config, axes, outputs, cancelled, moments, plan)
    else:
        moving = update_moments(config, axes, grad, moments, plan)
        update, running_rms = tensor_update(weights, config, axes, param, grad, moments, plan)
    moments = moments._replace(running_rms=running_rms.where(moving, moments.running_rms))
    store_moments(config, frame, states, moments)
    size = group["rms_scale"] * members[0].factor * lr
    descend(group, lr, view, params, update.mul_(torch.where(moving, size, 0.0)))


def _parts(group: Group, members: list[Member]) -> tuple[list[Tensor], list[Tensor]]:
    """This process's parts of the parameters, and of the gradients to descend."""
    grads = [local(member.grad) for member in members]
    params = [local(member.param).detach() for member in members]
    return params, list(torch._foreach_neg(grads)) if group["maximize"] else grads


def _find_kernel(
    wish: str | None, axes: Axes, param: Stack, grad: Stack, moments: Moments, plan: Plan
) -> Any:
    """The module of the Triton kernels where this stack should use them, else None."""
    first = param.members[0]
    fake = isinstance(first, FakeTensor) or torch.compiler.is_compiling()  # without memory
    by_default = wish is None and first.is_cuda and not (plan.compiles or fake)
    if wish != "triton" and not (by_default and importlib.util.find_spec("triton")):
        return None
    if first.device.type == "cpu" and not fake and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            'kernel="triton" needs parameters on a GPU, and these are on the CPU: leave it out, or '
            "set TRITON_INTERPRET=1 before triton is imported, whose interpreter is slow."
        )
    from celo2.torch import kernel

    return kernel if kernel.can_run(axes, param, grad, moments, plan) else None


def descend(group: Group, lr: Rate, view: MatrixView, params: list[Tensor], update: Tensor) -> None:
    """Moves parameters by a stack of updates: param ← (1 - lr · decay) param - update."""
    steps = [from_view(own, view, params[0].shape) for own in update.unbind(0)]
    if not group["weight_decay"]:
        torch._foreach_sub_(params, steps)
        return
    keep = 1 - lr * group["weight_decay"]
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


def init_adam_state(param: Tensor) -> dict[str, Tensor]:
    """Zeros under torch's names, and a count of gradients that are not finite."""
    dtype, device = torch.promote_types(param.dtype, torch.float32), local(param).device
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format),
        "skipped": torch.zeros((), dtype=torch.int32, device=device),
    }


def restore_adam_state(param: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A loaded state as `init_adam_state` makes it; older ones had no count, and torch's dtypes."""
    new = init_adam_state(param)
    return {
        name: state[name].to(zeros.dtype) if name in state else zeros for name, zeros in new.items()
    }


def move_by_adam(group: Group, lr: Rate, members: list[Member]) -> None:
    """Updates parameters and states by AdamW, at a multiple of the rule's rate.

    Unlike torch's AdamW, its arithmetic and state are in float32 at least, whatever the
    parameter's dtype, no finite gradient makes them infinite, and step counts stay on the device.
    """
    for some in _group_equal(members, group["foreach"]):
        _move_stack_by_adam(group, lr, some)


def _move_stack_by_adam(group: Group, lr: Rate, members: list[Member]) -> None:
    param, grad = map(Stack, _parts(group, members))
    states = [member.state for member in members]
    averages = [Stack([local(s[name]) for s in states]) for name in ("exp_avg", "exp_avg_sq")]
    plan = Plan(Extent(param.shape), group["workspace"] or default_workspace(param.members[0]))
    everywhere = tuple(range(1 - len(param.shape), 0))

    if group["skip_nonfinite"]:
        counts = [s["skipped"] for s in states]
        bad = (find_peak(grad, everywhere, plan) < torch.inf).logical_not_().flatten()
        old = torch.stack(counts)
        torch._foreach_copy_(counts, list((old + (bad & (old < LAST_COUNT))).unbind(0)))
    steps = [s["step"] for s in states]
    torch._foreach_add_(steps, 1.0)
    corrections = _bias_corrections(torch.stack(steps), group["betas"], group["adam_nesterov"])
    corrections = [x.view(-1, *[1] * len(everywhere)) for x in corrections]
    for block in plan.blocks(param.shape, 8):
        own, own_grad, *old = take((param, grad, *averages), block)
        by_block = [part(x, block) for x in corrections]
        _move_block(group, lr, members[0].factor, own, own_grad, old, by_block)
        put((param, *averages), block, (own, *old))


def _bias_corrections(
    steps: Tensor, betas: tuple[float, float], nesterov: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of the first moment and of Nesterov's gradient, divisor of the second moment."""
    beta1, beta2 = betas
    first, second = 1 - beta1**steps, 1 - beta2**steps
    if not nesterov:
        return 1 / first, torch.zeros_like(first), second
    return beta1 / (1 - beta1 ** (steps + 1)), (1 - beta1) / first, second


def _move_block(
    group: Group,
    lr: Rate,
    factor: float,
    param: Tensor,
    grad: Tensor,
    averages: list[Tensor],
    corrections: list[Tensor],
) -> None:
    exp_avg, exp_avg_sq = averages
    beta1, beta2 = group["betas"]
    grad = grad.to(exp_avg.dtype)
    if group["skip_nonfinite"]:
        grad = grad.nan_to_num(0.0, 0.0, 0.0)
    grad = grad.clamp(-ADAM_GRADIENT_LIMIT, ADAM_GRADIENT_LIMIT)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    of_average, of_grad, of_square = corrections
    update = exp_avg * of_average
    if group["adam_nesterov"]:
        update.addcmul_(grad, of_grad)
    update.div_((exp_avg_sq / of_square).sqrt_().add_(group["eps"]))
    rate = group["adam_multiplier"] * lr
    # In half precision the decay, done by itself, would be rounded away.
    moved = param if param.dtype == update.dtype else param.to(update.dtype)
    if group["weight_decay"]:
        moved.mul_(1 - rate * group["weight_decay"])
    moved.sub_(update.mul_(factor * rate))
    if moved is not param:
        torch._foreach_copy_([param], [moved])
