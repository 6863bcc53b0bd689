"""Everything that decides a meta-training run."""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from celo2.rule import CELO2, CELO2_BASE, RuleConfig, Start, check_choices, check_pairs, mix_column
from celo2.runs.fields import check_numbers, replace_fields

Estimator = Literal["pes", "nres", "truncated_es", "full_es", "backprop"]
Augmentation = Literal["none", "global", "tensor", "parameter"]
Decay = Literal["constant", "cosine"]
InnerDecay = Literal["constant", "cosine", "late"]
InnerAdam = Literal["published", "adam", "nesterov"]
Balance = Literal["none", "deviation"]
Learn = Literal["all", "mix", "linear"]

# What a family leaves open is the run's.
INHERITED = ("problems", "batch", "truncation", "unroll", "inner_rates", "augmentation")


@dataclass(frozen=True)
class FamilyConfig:
    """A kind of inner problems; what is None is taken from the family's own table, else the run's.

    Args:
        name: one of `celo2.metatrain.families.FAMILIES`, or `module:function` that returns a Task.
        problems: pairs per dataset of the family.
        batch: examples per inner step.
        truncation: inner steps per outer iteration.
        unroll: shortest and longest unroll.
        inner_rates: a range each problem draws its own rate from.
        augmentation: at which level initial weights are rescaled.
        weight: of its gradient among the families'.
    """

    name: str
    problems: int | None = None
    batch: int | None = None
    truncation: int | None = None
    unroll: tuple[int, int] | None = None
    inner_rates: tuple[float, float] | None = None
    augmentation: Augmentation | None = None
    weight: float = 1.0

    def __post_init__(self):
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight={self.weight} of {self.name} must be a positive number.")


@dataclass(frozen=True)
class MetaConfig:
    """A meta-training run, the paper's by default; equal configs and data make equal rules.

    Args:
        rule: what the rule computes.
        start: what its first weights give: noise, or a known direction (Muon's is nesterov, Adam's
            momentum_over_rms).
        start_mix: in place of `start`, a mix of features: the name of each and its coefficients.
        odd: keep the rule's direction an odd function of gradients and parameters.
        learn: which weights: all of them; or the mix, what the two units that carry the start have
            in the first layer, a coefficient for each feature and a threshold; or of that mix only
            the coefficients of odd features, so that an odd rule stays linear.
        iterations: outer iterations.
        seed: of everything random.
        families: the kinds of inner problems; none are the paper's image MLPs.
        datasets: the image sets problems draw from; None takes the paper's four if they are at
            hand, else the embedded digits.
        task: `module:function` that returns a Task of your own, in place of the families.
        problems: inner problems per dataset, each an antithetic pair.
        batch: examples per inner step.
        estimator: of the meta-gradient: evolution strategies, or backpropagation through the last
            `truncation` steps of an unroll, each problem's gradient scaled to length 1.
        truncation: inner steps per outer iteration.
        unroll: shortest and longest unroll; lengths are log-uniform multiples of `truncation`.
        late_weight: power p of the weight (p + 1) (t / T)^p that a loss t steps into an unroll of
            T has in the meta-objective; 0 is the mean loss.
        balance: how the families' gradients are brought to one scale: not at all, or divided by
            the running deviation of the loss differences.
        sigma: standard deviation of the perturbations.
        inner_learning_rate: of the rule.
        inner_rates: in its place, a range each problem draws its own rate from, log-uniform;
            divided by the problem's scale, so that it stays in proportion to the weights.
        inner_warmup: part of an unroll over which the rule's rate rises from zero.
        inner_decay: of the rule's rate over an unroll, or over its last `truncation` steps (late).
        inner_weight_decays: values each problem draws its weight decay from.
        inner_adam: who updates what the rule does not: Adam as in the published trainer (no bias
            correction), Adam, or Adam with Nesterov's momentum.
        adam_multiplier: Adam's rate, as a multiple of the rule's.
        augmentation: at which level initial weights are rescaled.
        augmentation_range: of those scales, log-uniform.
        learning_rate: of the outer AdamW.
        decay: of that rate over `iterations`.
        warmup: iterations over which that rate rises from zero.
        weight_decay: of the outer AdamW.
        clip: largest norm of the outer gradient; None does not clip it.
        averaging: decay of a running average of the outer weights, which is then the rule that is
            tried and saved; 0 takes the newest weights.
        loss_limit: inner losses above it, and those that are not finite, count as this; None is
            1.5 times the log of the number of classes.
    """

    rule: RuleConfig = field(default_factory=lambda: CELO2)
    start: Start = "random"
    start_mix: tuple[tuple[str, tuple[float, ...]], ...] = ()
    odd: bool = False
    learn: Learn = "all"
    iterations: int = 100_000
    seed: int = 0
    families: tuple[FamilyConfig, ...] = ()
    datasets: tuple[str, ...] | None = None
    task: str | None = None
    problems: int = 8
    batch: int = 64
    estimator: Estimator = "pes"
    truncation: int = 50
    unroll: tuple[int, int] = (100, 2000)
    late_weight: float = 0.0
    balance: Balance = "none"
    sigma: float = 0.01
    inner_learning_rate: float = 1e-3
    inner_rates: tuple[float, float] | None = None
    inner_warmup: float = 0.0
    inner_decay: InnerDecay = "constant"
    inner_weight_decays: tuple[float, ...] = (0.0,)
    inner_adam: InnerAdam = "published"
    adam_multiplier: float = 20.0
    augmentation: Augmentation = "global"
    augmentation_range: tuple[float, float] = (1e-3, 1e3)
    learning_rate: float = 5e-5
    decay: Decay = "constant"
    warmup: int = 0
    weight_decay: float = 1e-4
    clip: float | None = None
    averaging: float = 0.0
    loss_limit: float | None = None

    def __post_init__(self):
        check_choices(self)
        if self.estimator == "backprop" and (self.balance != "none" or self.late_weight):
            raise ValueError(
                "estimator='backprop' differentiates the loss at the end and scales every gradient "
                "to length 1: it takes neither balance nor late_weight."
            )
        check_numbers(
            self,
            counts=("iterations", "problems", "batch", "truncation"),
            positive=("sigma", "inner_learning_rate", "learning_rate", "clip"),
            from_zero=("adam_multiplier", "weight_decay", "loss_limit", "late_weight", "warmup"),
            below_one=("averaging", "inner_warmup"),
        )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be from 0 to 2³² - 1.")
        decays = self.inner_weight_decays
        if not decays or not all(0 <= value < math.inf for value in decays):
            raise ValueError(f"inner_weight_decays={decays} must hold numbers of at least 0.")
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
        if self.start_mix:
            if self.start != "random":
                raise ValueError(f"start={self.start!r} and start_mix were given: give one.")
            mix_column(self.rule, dict(self.start_mix))
        if self.odd:
            check_pairs(self.rule)
        names = [family.name for family in self.families]
        if len(set(names)) < len(names):
            raise ValueError(f"families={', '.join(names)}: a family may be named once.")
        if self.families and self.task is not None:
            raise ValueError(
                f"task={self.task!r} and families were given: name the task among the families."
            )


def of_family(
    config: MetaConfig, family: FamilyConfig, usual: Mapping[str, Any] | None = None
) -> MetaConfig:
    """The run's config with what the family has of its own, else with what is usual for it."""
    own = {name: value for name, value in vars(family).items() if value is not None}
    changes = {name: v for name, v in {**(usual or {}), **own}.items() if name in INHERITED}
    return dataclasses.replace(config, families=(), start_mix=(), start="random", **changes)


PRESETS = {
    "celo2": MetaConfig(),
    "celo2-base": MetaConfig(rule=CELO2_BASE, learning_rate=1e-4),
}
"""The paper's two meta-training runs, `celo2` and `celo2-base`."""


def from_fields(fields: Mapping[str, Any], base: MetaConfig | None = None) -> MetaConfig:
    """`base` (the paper's config) with these fields in place of its own, checked by type.

    A mix may be a table, families a list of tables or names.

    >>> from_fields({"problems": 4, "rule": {"hidden": [4]}}).rule.hidden
    (4,)
    >>> config = from_fields({"families": ["transformer", {"name": "vit", "problems": 2}]})
    >>> config.families[1].problems
    2
    """
    fields = dict(fields)
    if isinstance(mix := fields.get("start_mix"), Mapping):
        fields["start_mix"] = list(mix.items())
    if isinstance(families := fields.get("families"), (list, tuple)):
        fields["families"] = [_family(family) for family in families]
    return replace_fields(base or MetaConfig(), fields)


def _family(family: Any) -> FamilyConfig:
    if isinstance(family, FamilyConfig):
        return family
    table = {"name": family} if isinstance(family, str) else family
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ValueError(f"families: {family!r} is neither a name nor a table with a name.")
    return replace_fields(FamilyConfig(table["name"]), table, f"families.{table['name']}.")


def read_toml(path: str | Path, base: MetaConfig | None = None) -> MetaConfig:
    """`base` with the fields of a TOML file in place of its own.

    The rule's are under [rule], a mix under [start_mix], each family under [[families]].
    """
    try:
        return from_fields(tomllib.loads(Path(path).read_text("utf-8")), base)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
