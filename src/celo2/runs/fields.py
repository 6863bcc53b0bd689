"""Configs as JSON and TOML have them, checked by type, and functions that they name."""

import dataclasses
import importlib
import json
import math
import os
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def check_numbers(
    config: Any,
    counts: Sequence[str] = (),
    positive: Sequence[str] = (),
    from_zero: Sequence[str] = (),
    below_one: Sequence[str] = (),
) -> None:
    """Raises a ValueError for the first of these fields that is out of range; None is allowed."""
    for names, fits, range_ in (
        (counts, lambda x: x >= 1, "at least 1"),
        (positive, lambda x: 0 < x < math.inf, "a positive number"),
        (from_zero, lambda x: 0 <= x < math.inf, "a number of at least 0"),
        (below_one, lambda x: 0 <= x < 1, "in [0, 1)"),
    ):
        for name in names:
            value = getattr(config, name)
            if value is not None and not fits(value):
                raise ValueError(f"{name}={value} must be {range_}.")


def to_fields(config: Any) -> dict[str, Any]:
    """The config as JSON: inner dataclasses become dicts, tuples become lists."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def replace_fields(base: T, fields: Mapping[str, Any], prefix: str = "") -> T:
    """`base` with these fields replaced; raises a ValueError for one that does not fit."""
    hints = get_type_hints(type(base))
    changes = {}
    for name, value in fields.items():
        if name not in hints:
            known = ", ".join(prefix + known for known in hints)
            raise ValueError(f"{prefix}{name} is not a field; there are {known}.")
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, Mapping):
            changes[name] = replace_fields(getattr(base, name), value, f"{prefix}{name}.")
        else:
            changes[name] = _fit(hints[name], value, prefix + name)
    return dataclasses.replace(base, **changes)  # pyright: ignore[reportArgumentType]: a dataclass


def differences(ours: Any, theirs: Any) -> dict[str, tuple[Any, Any]]:
    """Every field in which two configs differ, `rule.form` and the like, with both values."""
    a, b = _flatten(to_fields(ours)), _flatten(to_fields(theirs))
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}


def describe_differences(ours: Any, theirs: Any, ignore: Collection[str] = ()) -> list[str]:
    """`differences` as lines, without the fields to ignore."""
    found = differences(ours, theirs).items()
    return [f"{name} is {new!r}, was {old!r}" for name, (new, old) in found if name not in ignore]


def _flatten(fields: Mapping[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in fields.items() if not isinstance(value, Mapping)}
    inner = {name: value for name, value in fields.items() if isinstance(value, Mapping)}
    return flat | {f"{name}.{key}": v for name, part in inner.items() for key, v in part.items()}


def _fit(hint: Any, value: Any, name: str) -> Any:
    """`value` as the field's type: an int may stand for a float, a list for a tuple."""
    kind, of = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return None if value is None else _fit(of[0], value, name)
    if kind is tuple and isinstance(value, (list, tuple)):
        hints = of[:1] * len(value) if of[-1] is Ellipsis else of
        if len(hints) == len(value):
            return tuple(_fit(h, v, name) for h, v in zip(hints, value, strict=True))
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif kind is Literal or (isinstance(hint, type) and type(value) is hint):
        return value
    wanted = hint.__name__ if isinstance(hint, type) and not of else str(hint)
    raise ValueError(f"{name}={value!r} is not of type {wanted}.")


def import_function(address: str, what: str, example: str) -> Callable[..., Any]:
    """The function at `module:function`; `what` names the option in errors."""
    module_name, colon, function_name = address.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"{what}={address!r} is not module:function, such as {example}.")
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0]:
            raise
        raise ValueError(
            f"{what}={address!r}: there is no module {module_name!r}; "
            "run in its folder, or put that folder on PYTHONPATH."
        ) from error
    except AttributeError as error:
        raise ValueError(f"{what}={address!r}: {module_name} has no {function_name!r}.") from error


def search_working_directory() -> None:
    """Lets `import_function` find modules in the current folder, as `python -m` does."""
    sys.path.insert(0, os.getcwd())
