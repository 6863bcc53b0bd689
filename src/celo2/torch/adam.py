"""The AdamW that moves what the rule does not, at a multiple of the rule's rate.

Its arithmetic and its state are in float32 at least, whatever the parameter's dtype, and bounded:
no finite gradient makes them infinite. Torch's own does neither, and reads its step counts on the
host.
"""

# pyright: reportPrivateImportUsage=false
# Torch has no public names for its foreach operations.

from typing import Any

import torch
from torch import Tensor

from celo2.rule import ADAM_GRADIENT_LIMIT, LAST_COUNT
from celo2.torch.blocks import Plan, Stack, default_workspace, part, put, take
from celo2.torch.moments import find_peak
from celo2.torch.tensors import Extent, aligned, local


def init_adam_state(param: Tensor) -> dict[str, Tensor]:
    """Zeros under torch's names, and a count of gradients that were not finite."""
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


def move_by_adam(
    group: dict[str, Any], lr: float | Tensor, params: list[Tensor], states: list[dict]
) -> None:
    """Updates parameters and their states, which are filled when they are empty."""
    kinds: dict[Any, list[tuple[Tensor, dict]]] = {}
    for i, (param, state) in enumerate(zip(params, states, strict=True)):
        if not state:
            state.update(init_adam_state(param))
        own = local(param)
        kind = own.shape, own.dtype, own.device, local(state["exp_avg"]).dtype
        kinds.setdefault(i if group["foreach"] is False else kind, []).append((param, state))
    for some in kinds.values():
        _move_stack(group, lr, *map(list, zip(*some, strict=True)))


def _move_stack(
    group: dict[str, Any], lr: float | Tensor, params: list[Tensor], states: list[dict]
) -> None:
    param = Stack([local(param).detach() for param in params])
    grads = [local(aligned(param.grad, param)) for param in params]
    grad = Stack(torch._foreach_neg(grads) if group["maximize"] else grads)
    averages = [Stack([local(s[name]) for s in states]) for name in ("exp_avg", "exp_avg_sq")]
    device = param.members[0].device
    plan = Plan(Extent(param.shape), group["workspace"] or default_workspace(device))
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
        _move_block(group, lr, own, own_grad, old, [part(x, block) for x in corrections])
        put((param, *averages), block, (own, *old))


def _bias_corrections(
    steps: Tensor, betas: tuple[float, float], nesterov: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What the first moment, the gradient that Nesterov adds and the second moment count for."""
    beta1, beta2 = betas
    first, second = 1 - beta1**steps, 1 - beta2**steps
    if not nesterov:
        return 1 / first, torch.zeros_like(first), second
    return beta1 / (1 - beta1 ** (steps + 1)), (1 - beta1) / first, second


def _move_block(
    group: dict[str, Any],
    lr: float | Tensor,
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
    moved.sub_(update.mul_(rate))
    if moved is not param:
        torch._foreach_copy_([param], [moved])
