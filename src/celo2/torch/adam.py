"""The AdamW that moves what the rule does not: torch's own, at a multiple of the rule's rate."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.nadam import nadam

FULL_MOMENTUM = 1e3  # a momentum_decay with which NAdam's does not warm up: Adam after Nesterov


def move_by_adam(
    group: dict[str, Any], lr: float | Tensor, params: list[Tensor], states: list[dict]
) -> None:
    """Updates parameters and their states, which are filled when they are empty."""
    if not params:
        return
    capturable, foreach = group["capturable"], group["foreach"]
    for param, state in zip(params, states, strict=True):
        if not state:
            on = param.device if capturable else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=on)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(param) for _ in range(2))
    if isinstance(lr, Tensor) and not capturable:
        foreach = False  # torch has no such foreach
    beta1, beta2 = group["betas"]
    grads: Any = [param.grad for param in params]  # all have one
    exp_avgs, exp_avg_sqs, steps = (
        [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")
    )
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
