"""Loading a state_dict: what must fit, and what torch's own loading would change."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from celo2.rule import Rule, RuleConfig
from celo2.torch.adam import restore_adam_state
from celo2.torch.modules import name_of, unpack_route
from celo2.torch.moments import momentum_names, small_shapes
from celo2.torch.tensors import Frame, frame_of

Groups = list[dict[str, Any]]

# What a group keeps when a state is loaded: the state is held to it.
OWN = ("rule", "rule_digest", "routes", "published")


def load_state(
    optimizer: Optimizer,
    rules: Mapping[str, Rule],
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
) -> None:
    """Loads by torch's own `load`, then puts back what the groups and the statistics keep."""
    own = [dict(group) for group in optimizer.param_groups]
    content: dict[str, Any] = {}

    def look(_, loaded: dict[str, Any]) -> None:
        check_content(optimizer.param_groups, rules, loaded)
        content.update(loaded)

    # The last of the hooks: it sees what the others have made of the content.
    handle = optimizer.register_load_state_dict_pre_hook(look)
    try:
        load(state_dict)
    finally:
        handle.remove()
    for group, before in zip(optimizer.param_groups, own, strict=True):
        # A setting may be newer than the saved state.
        group.update({k: v for k, v in before.items() if k in OWN or k not in group})
    restore_statistics(optimizer.param_groups, optimizer.state, content)
    for group, saved in zip(optimizer.param_groups, content["param_groups"], strict=True):
        if saved.get("rule_digest") != group["rule_digest"]:
            warnings.warn(
                f"The state was saved with another rule than {group['rule']}, which goes on "
                "with it.",
                stacklevel=3,  # the line that loads
            )


def check_content(groups: Groups, rules: Mapping[str, Rule], content: dict[str, Any]) -> None:
    """Raises a ValueError where a state_dict was made with another rule or other routes."""
    sizes, saved_sizes = (
        [len(group["params"]) for group in some] for some in (groups, content["param_groups"])
    )
    if sizes != saved_sizes:
        return  # torch has an error for that
    for group, i, state in _saved_states(groups, content):
        route, name = unpack_route(group["routes"][i]), name_of(group, i)
        if route.updater == "adam":
            check_adam_state(state, name)
        else:
            frame = frame_of(group["params"][i], route.view)
            check_state(rules[group["rule"]].config, frame, state, name)


def restore_statistics(groups: Groups, states: dict, content: dict[str, Any]) -> None:
    """Puts statistics back in the dtypes that torch has cast away, on their parameter's device."""
    for group, i, state in _saved_states(groups, content):
        param = group["params"][i]
        state = {name: x.to(param.device) for name, x in state.items()}
        if unpack_route(group["routes"][i]).updater == "adam":
            state = restore_adam_state(param, state)
        states[param] = state


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


def _saved_states(
    groups: Groups, content: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], int, dict[str, Tensor]]]:
    """Each parameter's group, its place there and its saved state, where it has one."""
    for group, saved in zip(groups, content["param_groups"], strict=True):
        for i, key in enumerate(saved["params"]):
            if state := content["state"].get(key):
                yield group, i, state
