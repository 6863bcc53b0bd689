"""A parameter's entry in the optimizer's state: plain tensors under names that stay the same."""

import torch
from torch import Tensor

from celo2.routing import MATRIX, Axes
from celo2.rule import RuleConfig
from celo2.torch.moments import Moments, small_shapes
from celo2.torch.tensors import Frame, local, to_view

COUNTS = ("moves", "skipped")


def momentum_names(config: RuleConfig) -> list[str]:
    return [f"momentum_{i}" for i in range(len(config.momentum_decays))]


def init_state(
    config: RuleConfig, frame: Frame, param: Tensor, momentum_dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Zeros: momenta and `rms` stored as the parameter is, the rest in its matrix view."""
    state = {
        name: torch.zeros_like(
            param, dtype=momentum_dtype or torch.float32, memory_format=torch.preserve_format
        )
        for name in momentum_names(config)
    }
    state["rms"] = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
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


def view_moments(config: RuleConfig, frame: Frame, state: dict[str, Tensor]) -> Moments:
    """This process's part of the state, viewed; it shares the state's memory where it can."""
    return Moments(
        tuple(to_view(local(state[name]), frame.view) for name in momentum_names(config)),
        to_view(local(state["rms"]), frame.view),
        *(local(state[name]) for name in ("rows", "cols", "running_rms", *COUNTS)),
    )


def check_state(config: RuleConfig, frame: Frame, state: dict[str, Tensor], name: str) -> None:
    """Raises a ValueError where a loaded state was made with another rule or other views."""
    missing = [key for key in (*momentum_names(config), "rms") if key not in state]
    if missing or f"momentum_{len(config.momentum_decays)}" in state:
        raise ValueError(
            f"the state of {name} has {sum(k.startswith('momentum_') for k in state)} momenta and "
            f"the rule {len(config.momentum_decays)}: it was made with another rule or routing."
        )
    for key, shape in small_shapes(config, frame.axes, frame.extent.shape).items():
        if tuple(state[key].shape) != shape:
            raise ValueError(
                f"the state of {name} has {key} of shape {tuple(state[key].shape)} where {shape} "
                "is needed: it was made with other views (see `overrides` and `published`)."
            )


def check_adam_state(state: dict[str, Tensor], name: str) -> None:
    """Raises a ValueError where a loaded state is not AdamW's."""
    if "exp_avg" not in state:
        raise ValueError(
            f"the state of {name} is the rule's, but AdamW updates it here: it was made with "
            "another routing (see `overrides` and `explain()`)."
        )


def _reduced(axes: Axes) -> dict[str, tuple[int, ...]]:
    """The axes that each small accumulator was reduced over."""
    counts = dict.fromkeys(COUNTS, axes.slice)
    return {"rows": axes.rows, "cols": axes.cols, "running_rms": MATRIX} | counts
