"""Everything that decides a meta-training run."""

import dataclasses
import math
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from celo2.rule import CELO2, CELO2_BASE, RuleConfig

Estimator = Literal["pes", "truncated_es", "full_es"]
Augmentation = Literal["none", "global", "tensor", "parameter"]
Decay = Literal["constant", "cosine"]


@dataclass(frozen=True)
class MetaConfig:
    """A meta-training run, the paper's by default; equal configs and data make equal rules.

    Args:
        rule: what the rule computes.
        iterations: outer iterations.
        seed: of everything random.
        datasets: the image sets problems draw from; None takes the paper's four if they are at
            hand, else the embedded digits.
        task: `module:function` that returns a Task of your own, in place of the images.
        problems: inner problems per dataset, each an antithetic pair.
        batch: images per inner step.
        estimator: of the meta-gradient.
        truncation: inner steps per outer iteration.
        unroll: shortest and longest unroll; lengths are log-uniform multiples of `truncation`.
        sigma: standard deviation of the perturbations.
        inner_learning_rate: of the rule, constant.
        adam_multiplier: Adam's rate on vectors, as a multiple of `inner_learning_rate`.
        augmentation: at which level initial weights are rescaled.
        augmentation_range: of those scales, log-uniform.
        learning_rate: of the outer AdamW.
        decay: of that rate over `iterations`.
        warmup: iterations over which that rate rises from zero.
        weight_decay: of the outer AdamW.
        loss_limit: inner losses above it, and NaN, count as this; None is 1.5 ln 10.
    """

    rule: RuleConfig = field(default_factory=lambda: CELO2)
    iterations: int = 100_000
    seed: int = 0
    datasets: tuple[str, ...] | None = None
    task: str | None = None
    problems: int = 8
    batch: int = 64
    estimator: Estimator = "pes"
    truncation: int = 50
    unroll: tuple[int, int] = (100, 2000)
    sigma: float = 0.01
    inner_learning_rate: float = 1e-3
    adam_multiplier: float = 20.0
    augmentation: Augmentation = "global"
    augmentation_range: tuple[float, float] = (1e-3, 1e3)
    learning_rate: float = 5e-5
    decay: Decay = "constant"
    warmup: int = 0
    weight_decay: float = 1e-4
    loss_limit: float | None = None

    def __post_init__(self):
        for name, kind in (
            ("estimator", Estimator),
            ("augmentation", Augmentation),
            ("decay", Decay),
        ):
            if getattr(self, name) not in get_args(kind):
                choices = ", ".join(get_args(kind))
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {choices}.")
        for name in ("iterations", "problems", "batch", "truncation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("sigma", "inner_learning_rate", "learning_rate"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be a positive number.")
        shortest, longest = self.unroll
        if not self.truncation <= shortest <= longest:
            raise ValueError(
                f"unroll={self.unroll} must be (shortest, longest) with "
                f"truncation={self.truncation} ≤ shortest ≤ longest."
            )
        low, high = self.augmentation_range
        if not 0 < low <= high < math.inf:
            raise ValueError(
                f"augmentation_range={self.augmentation_range} must be 0 < low ≤ high."
            )

    @property
    def highest_loss(self) -> float:
        return 1.5 * math.log(10) if self.loss_limit is None else self.loss_limit


PRESETS = {
    "celo2": MetaConfig(),
    "celo2-base": MetaConfig(rule=CELO2_BASE, learning_rate=1e-4),
}


def to_fields(config: MetaConfig) -> dict[str, Any]:
    """The config as JSON has it: the rule's fields in a dict of their own, tuples as lists."""
    return _as_json(dataclasses.asdict(config))


def from_fields(fields: Mapping[str, Any], base: MetaConfig | None = None) -> MetaConfig:
    """`base` (the paper's config) with these fields in place of its own, checked by type.

    >>> from_fields({"problems": 4, "rule": {"hidden": [4]}}).rule.hidden
    (4,)
    """
    return _replace(base or MetaConfig(), fields, "")


def read_toml(path: str | Path, base: MetaConfig | None = None) -> MetaConfig:
    """`base` with the fields of a TOML file in place of its own; the rule's are under [rule]."""
    try:
        return from_fields(tomllib.loads(Path(path).read_text("utf-8")), base)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def differences(ours: MetaConfig, theirs: MetaConfig) -> dict[str, tuple[Any, Any]]:
    """Every field in which two configs differ, `rule.form` and the like, with both values."""
    a, b = _flatten(to_fields(ours)), _flatten(to_fields(theirs))
    return {name: (a[name], b[name]) for name in a if a[name] != b[name]}


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_json(v) for key, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _flatten(fields: Mapping[str, Any]) -> dict[str, Any]:
    rule = {f"rule.{name}": value for name, value in fields["rule"].items()}
    return {name: value for name, value in fields.items() if name != "rule"} | rule


def _replace(base: Any, fields: Mapping[str, Any], prefix: str) -> Any:
    hints = get_type_hints(type(base))
    changes = {}
    for name, value in fields.items():
        if name not in hints:
            known = ", ".join(prefix + known for known in hints)
            raise ValueError(f"{prefix}{name} is not a field; there are {known}.")
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, Mapping):
            changes[name] = _replace(getattr(base, name), value, f"{prefix}{name}.")
        else:
            changes[name] = _fit(hints[name], value, prefix + name)
    return dataclasses.replace(base, **changes)


def _fit(hint: Any, value: Any, name: str) -> Any:
    """`value` as the field's type has it: an int may stand for a float, a list for a tuple."""
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
