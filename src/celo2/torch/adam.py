"""The AdamW that moves what the rule does not: torch's own, at a multiple of the rule's rate."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam


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
    adam(
        params,
        [param.grad for param in params],  # pyright: ignore[reportArgumentType]: all have one
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        foreach=foreach,
        capturable=capturable,
        decoupled_weight_decay=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["adam_multiplier"] * lr,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
