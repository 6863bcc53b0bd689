"""Everything that decides a meta-training run."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from celo2.rule import CELO2, CELO2_BASE, RuleConfig, Start
from celo2.runs.fields import replace_fields

Estimator = Literal["pes", "truncated_es", "full_es"]
Augmentation = Literal["none", "global", "tensor", "parameter"]
Decay = Literal["constant", "cosine"]


@dataclass(frozen=True)
class MetaConfig:
    """A meta-training run, the paper's by default; equal configs and data make equal rules.

    Args:
        rule: what the rule computes.
        start: what its first weights give: noise, or a known direction (Muon's is momentum, Adam's
            momentum_over_rms).
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
        inner_learning_rate: of the rule.
        inner_rates: in its place, a range each problem draws its own rate from, log-uniform;
            divided by the problem's scale, so that it stays in proportion to the weights.
        inner_decay: of the rule's rate over an unroll.
        adam_multiplier: Adam's rate on vectors, as a multiple of the rule's.
        augmentation: at which level initial weights are rescaled.
        augmentation_range: of those scales, log-uniform.
        learning_rate: of the outer AdamW.
        decay: of that rate over `iterations`.
        warmup: iterations over which that rate rises from zero.
        weight_decay: of the outer AdamW.
        loss_limit: inner losses above it, and those that are not finite, count as this; None is
            1.5 ln 10.
    """

    rule: RuleConfig = field(default_factory=lambda: CELO2)
    start: Start = "random"
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
    inner_rates: tuple[float, float] | None = None
    inner_decay: Decay = "constant"
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
            ("start", Start),
            ("estimator", Estimator),
            ("augmentation", Augmentation),
            ("inner_decay", Decay),
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
        for name in ("adam_multiplier", "weight_decay", "loss_limit"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be a number of at least 0.")
        if self.warmup < 0:
            raise ValueError(f"warmup={self.warmup} must be at least 0.")
        if self.decay == "cosine" and self.warmup >= self.iterations:
            raise ValueError(
                f"warmup={self.warmup} must be below iterations={self.iterations}: the cosine "
                "decay comes between them."
            )
        shortest, longest = self.unroll
        if not self.truncation <= shortest <= longest:
            raise ValueError(
                f"unroll={self.unroll} must be (shortest, longest) with "
                f"truncation={self.truncation} ≤ shortest ≤ longest."
            )
        for name in ("augmentation_range", "inner_rates"):
            low, high = getattr(self, name) or (1.0, 1.0)
            if not 0 < low <= high < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 < low ≤ high.")
        if self.inner_rates and self.augmentation not in ("none", "global"):
            raise ValueError(
                f"inner_rates={self.inner_rates} need one scale per problem: set augmentation to "
                f"none or global, not {self.augmentation}."
            )

    @property
    def highest_loss(self) -> float:
        return 1.5 * math.log(10) if self.loss_limit is None else self.loss_limit


PRESETS = {
    "celo2": MetaConfig(),
    "celo2-base": MetaConfig(rule=CELO2_BASE, learning_rate=1e-4),
}


def from_fields(fields: Mapping[str, Any], base: MetaConfig | None = None) -> MetaConfig:
    """`base` (the paper's config) with these fields in place of its own, checked by type.

    >>> from_fields({"problems": 4, "rule": {"hidden": [4]}}).rule.hidden
    (4,)
    """
    return replace_fields(base or MetaConfig(), fields)


def read_toml(path: str | Path, base: MetaConfig | None = None) -> MetaConfig:
    """`base` with the fields of a TOML file in place of its own; the rule's are under [rule]."""
    try:
        return from_fields(tomllib.loads(Path(path).read_text("utf-8")), base)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
