"""Parameter groups: what may be in one, and the route of each parameter in it."""

import re
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from celo2.routing import Explanation, Line, MatrixView, Overrides, Route, check_overrides
from celo2.rule import RuleConfig
from celo2.torch.modules import Named, describe, find_head, route

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


def find_modules(params: Any) -> Any:
    """What torch's constructor takes, with the parameters of modules in their place.

    A model that is given alone, or the last of several groups, ends with the output.
    """
    if isinstance(params, nn.Module):
        params = [{"params": params}]
    if isinstance(params, (Tensor, dict)):
        return params  # torch refuses them
    groups = list(params)
    for i, group in enumerate(groups):
        module = group.get("params") if isinstance(group, dict) else None
        if isinstance(module, nn.Module):
            last = i == len(groups) - 1
            head = find_head(module, alone=len(groups) == 1) if last else None
            groups[i] = group | {"params": _list_module(module, head)}
    return groups


def _list_module(module: nn.Module, head: nn.Module | None = None) -> list[Named]:
    if not (described := describe(module, head)):
        raise ValueError("Celo2 got an empty parameter list: the model has none.")
    return described


def list_params(params: Any) -> list[Named]:
    """The parameters of one group, with what a model or their names tell of them."""
    if isinstance(params, nn.Module):
        return _list_module(params)
    if isinstance(params, Tensor):
        params = [params]
    if isinstance(params, (set, frozenset)):
        raise TypeError("parameters in a set have no order that lasts: give celo2 a list.")
    found = []
    for param in params:
        if not isinstance(param, Named):
            param = Named(*param[:2]) if isinstance(param, tuple) else Named("", param)
        found.append(param)
    if any(named.name for named in found) and not all(named.name for named in found):
        raise ValueError(
            "all optimizer params should be with/without names. Some param names are missing: "
            f"{sum(not named.name for named in found)} of {len(found)}."
        )
    return found


def check_params(named: list[Named]) -> None:
    """Raises where a parameter is nothing that celo2 can update."""
    seen: set[int] = set()
    for i, (name, param, *_) in enumerate(named):
        name = name or f"parameter {i}"
        if not isinstance(param, Tensor):
            raise TypeError(f"celo2 updates tensors, but {name} is a {type(param).__name__}.")
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} has no shape yet: run the model once, then make Celo2.")
        if not param.is_floating_point():
            raise TypeError(
                f"celo2 updates real floating-point parameters, but {name} is {param.dtype}."
            )
        marks = ("_is_flat_param", "_fsdp_flattened")
        flat = type(param).__name__ == "FlatParameter" or any(hasattr(param, m) for m in marks)
        if flat or "_fsdp_wrapped_module" in name:
            raise ValueError(
                f"{name} is flattened by FullyShardedDataParallel: rows and columns are lost. "
                "Use fully_shard (FSDP2), which keeps every tensor's shape."
            )
        if id(param) in seen:
            raise ValueError(f"a parameter group with duplicate parameters: {name} comes twice.")
        seen.add(id(param))


def check_settings(group: dict[str, Any]) -> None:
    """Raises a ValueError for a setting that no training can mean."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, but it has shape {tuple(lr.shape)}.")
    for name in ("lr", "weight_decay", "rms_scale", "adam_multiplier", "eps"):
        if not isinstance(group[name], Tensor) and not group[name] >= 0:
            raise ValueError(f"{name}={group[name]} must not be negative.")
    betas = group["betas"]
    if len(betas) != 2 or not all(isinstance(b, Tensor) or 0 <= b < 1 for b in betas):
        raise ValueError(f"betas={betas} must be two numbers in [0, 1).")
    for name in ("momentum_dtype", "newton_schulz_dtype"):
        if group[name] is not None and not group[name].is_floating_point:
            raise ValueError(f"{name}={group[name]} must be a floating-point dtype.")
    if group["updater"] not in (None, "rule", "adam"):
        raise ValueError(f'updater={group["updater"]!r} is not "rule", "adam" or None.')


def check_patterns(overrides: Overrides) -> None:
    """Raises a ValueError for an override that is no regular expression."""
    for pattern in overrides:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"override {pattern!r} is not a regular expression: {error}."
            ) from None


def check_names(overrides: Overrides, groups: list[dict[str, Any]]) -> None:
    """Raises a ValueError for overrides that reach no parameter."""
    names = [name for group in groups for name in group.get("param_names", ())]
    if overrides and not names:
        raise ValueError(
            "overrides go by name, but Celo2 got parameters without names: pass the model "
            "itself or model.named_parameters()."
        )
    check_overrides(overrides, names)


def route_group(
    named: list[Named],
    config: RuleConfig,
    updater: str | None,
    overrides: Overrides,
    published: bool,
) -> list[tuple]:
    """The routes of a group's parameters, as plain tuples that a state_dict can hold."""
    routes = [route(one, config, overrides, published) for one in named]
    if updater is not None:
        routes = [r._replace(updater=updater, reason="parameter group") for r in routes]
    elif config.vectors == "adam" and any(
        r.updater == "rule" and not one.name for r, one in zip(routes, named, strict=True)
    ):
        warnings.warn(
            "Celo2 got parameters without names and cannot tell embeddings and output heads, "
            "which AdamW should update, from hidden matrices: pass the model itself or "
            "model.named_parameters().",
            stacklevel=5,  # the line that makes the optimizer
        )
    return [(r.updater, r.reason, *r.view) for r in routes]


def unpack_route(packed: tuple) -> Route:
    """A Route from its plain form."""
    updater, reason, batch, rows, columns, published = packed
    view = MatrixView(tuple(batch), tuple(rows), tuple(columns), published)
    return Route(updater, reason, view)


def name_of(group: dict[str, Any], i: int) -> str:
    """What messages call a parameter of a group."""
    return group["param_names"][i] if "param_names" in group else f"parameter {i}"


def check_gradients(group: dict[str, Any]) -> None:
    """Raises a RuntimeError for a gradient that celo2 has no use for."""
    for i, param in enumerate(group["params"]):
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise RuntimeError(
                f"celo2 takes dense gradients, but {name_of(group, i)}'s is sparse: make its "
                "embedding with sparse=False, or give it to torch.optim.SparseAdam."
            )


def explain_groups(groups: list[dict[str, Any]]) -> Explanation:
    """A line for each parameter: who updates it, why, and how it is seen."""
    lines = Explanation()
    for group in groups:
        for i, (param, packed) in enumerate(zip(group["params"], group["routes"], strict=True)):
            route, shape = unpack_route(packed), tuple(param.shape)
            lines.append(
                Line(name_of(group, i), shape, *route, route.view.shape(shape), param.numel())
            )
    return lines
