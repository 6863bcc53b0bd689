"""The AdamW that moves what the rule does not: torch's own, at a multiple of the rule's rate."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.nadam import nadam

from celo2.torch.blocks import blocks, part
from celo2.torch.tensors import aligned, local

FULL_MOMENTUM = 1e3  # a momentum_decay with which NAdam's does not warm up: Adam after Nesterov
# Elements that torch gets at a time, which bounds the copies of gradients: on a CPU as many as stay
# in its caches, elsewhere enough to be worth a kernel.
BATCH, LARGE_BATCH = 2**20, 2**24


class Piece(NamedTuple):
    """What this process has of a parameter, or a part of that, with its gradient and state."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


def move_by_adam(
    group: dict[str, Any], lr: float | Tensor, params: list[Tensor], states: list[dict]
) -> None:
    """Updates parameters and their states, which are filled when they are empty."""
    for param, state in zip(params, states, strict=True):
        if not state:
            on = param.device if group["capturable"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=on)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(param) for _ in range(2))
    for batch in _batches(_pieces(params, states)):
        _move(group, lr, batch)


def _pieces(params: list[Tensor], states: list[dict]) -> Iterator[Piece]:
    """Parameters of at most a batch, and parts of larger ones: AdamW goes element by element."""
    for param, state in zip(params, states, strict=True):
        grad = aligned(param.grad, param)  # all have one
        whole = [local(x) for x in (param, grad, state["exp_avg"], state["exp_avg_sq"])]
        *cuts, last = blocks(tuple(whole[0].shape), _limit(whole[0]))
        for cut in cuts:
            yield Piece(*[part(x, cut) for x in whole], step=state["step"].clone())
        yield Piece(*[part(x, last) for x in whole], step=state["step"])


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """The pieces in order, a limited number of elements at a time."""
    batch, size = [], 0
    for piece in pieces:
        if batch and size + piece.param.numel() > _limit(piece.param):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.param.numel()
    if batch:
        yield batch


def _limit(x: Tensor) -> int:
    return BATCH if x.device.type == "cpu" else LARGE_BATCH


def _move(group: dict[str, Any], lr: float | Tensor, batch: list[Piece]) -> None:
    stored, grads, exp_avgs, exp_avg_sqs, steps = (list(xs) for xs in zip(*batch, strict=True))
    # In half precision the decay, which torch does first, would be rounded away.
    params = [_in_full(x) for x in stored] if group["weight_decay"] else stored
    if group["skip_nonfinite"]:
        # Copies: the gradients are the user's.
        grads = [torch.nan_to_num(grad, 0.0, 0.0, 0.0) for grad in grads]
    foreach, capturable = group["foreach"], group["capturable"]
    mixed = any(new is not old for new, old in zip(params, stored, strict=True))
    if mixed or (isinstance(lr, Tensor) and not capturable):
        foreach = False  # torch has no such foreach
    beta1, beta2 = group["betas"]
    shared = {
        "foreach": foreach,
        "capturable": capturable,
        "decoupled_weight_decay": True,
        "beta1": beta1,
        "beta2": beta2,
        "lr": group["adam_multiplier"] * lr,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "maximize": group["maximize"],
    }
    if group["adam_nesterov"]:
        # The product of all momenta so far, which NAdam keeps, is a power here.
        products = [beta1**step for step in steps]
        sums = exp_avgs, exp_avg_sqs, products, steps
        nadam(params, grads, *sums, momentum_decay=FULL_MOMENTUM, **shared)
    else:
        adam(params, grads, exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, **shared)
    for old, new in zip(stored, params, strict=True):
        if old is not new:
            old.copy_(new)


def _in_full(x: Tensor) -> Tensor:
    """The tensor itself, or a copy in float32 of one in half precision."""
    return x.float() if x.dtype.itemsize < 4 else x
