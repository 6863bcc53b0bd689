"""The config of a meta-training run."""

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

# Settings that a family takes from the run where it has none of its own.
INHERITED = ("problems", "batch", "truncation", "unroll", "inner_rates", "augmentation")


@dataclass(frozen=True)
class FamilyConfig:
    """A kind of inner problems; None takes the default of the family's entry, else the run's value.

    Args:
        name: one of `celo2.metatrain.families.FAMILIES`, or `module:function` that returns a Task.
        problems: inner problems per dataset of the family.
        batch: examples per inner step.
        truncation: inner steps per outer iteration.
        unroll: shortest and longest unroll, in inner steps.
        inner_rates: range from which each problem draws its learning rate.
        augmentation: level at which initial weights are rescaled.
        weight: weight of the family's meta-gradient in the sum over families.
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
        rule: inputs, network and output of the rule.
        start: initial direction of the rule: random, or that of a known optimizer (nesterov is
            Muon's, momentum_over_rms is Adam's).
        start_mix: initial direction as a mix of features, each name followed by its coefficients;
            replaces `start`.
        odd: make the rule's direction an odd function of gradients and parameters: it changes its
            sign when they do.
        learn: weights to learn: all; mix, only the mix of features that carries the start (a
            coefficient for each feature and a threshold); linear, only the mix's coefficients of
            odd features, so that an odd rule stays linear.
        iterations: number of outer iterations.
        seed: random seed of the whole run: initial weights, problems, data and perturbations.
        families: families of inner problems; if empty, the paper's image MLPs.
        datasets: image sets that problems draw from; None: the paper's four if the data folder has
            them, else scikit-learn's digits.
        task: `module:function` that returns a Task of your own, to train on instead of families.
        problems: inner problems per dataset; evolution strategies train each one twice.
        batch: examples per inner step.
        estimator: estimator of the meta-gradient: an evolution strategy (pes, nres, truncated_es,
            full_es), or backpropagation through the last `truncation` steps of an unroll.
        truncation: inner steps per outer iteration.
        unroll: shortest and longest unroll, in inner steps; lengths are log-uniform multiples
            of `truncation`.
        late_weight: emphasis p on the end of an unroll: the loss at step t of T counts with
            weight (p+1)(t/T)^p; 0 weighs all steps alike.
        balance: scaling of the families' meta-gradients: none, or deviation, which divides each by
            the running standard deviation of its loss differences.
        sigma: standard deviation of the perturbations of the rule's weights.
        inner_learning_rate: learning rate of the rule on inner problems.
        inner_rates: range from which each problem draws its learning rate, log-uniform and in
            proportion to its weights' scale; replaces `inner_learning_rate`.
        inner_warmup: length of the inner warm-up, as a fraction of the unroll.
        inner_decay: decay of the inner learning rate: constant; cosine, to zero over the unroll;
            late, to zero over its last `truncation` steps.
        inner_weight_decays: values from which each problem draws its weight decay.
        inner_adam: optimizer of the tensors that the rule does not update: published (Adam without
            bias correction, as in the published code), adam, or nesterov (Adam with Nesterov's
            momentum).
        adam_multiplier: learning rate of that optimizer, as a multiple of the rule's.
        augmentation: random rescaling of initial weights: none, or one scale per problem (global),
            per tensor or per parameter.
        augmentation_range: smallest and largest of these scales, log-uniform.
        learning_rate: learning rate of the outer optimizer, AdamW.
        decay: decay of the outer learning rate: constant, or cosine (to zero at the end of the
            run).
        warmup: outer iterations in which the outer learning rate rises from zero.
        weight_decay: weight decay of the outer optimizer.
        clip: maximum norm of the meta-gradient, which is scaled down to it; None: no clipping.
        averaging: decay of a running average of the rule's weights; the average is then tried and
            saved. 0: no averaging.
        loss_limit: upper limit of inner losses; larger ones and those that are not finite count as
            the limit. None: 1.5 times the log of the number of classes.
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
    """The run's config with the family's own settings, else with the `usual` ones."""
    own = {name: value for name, value in vars(family).items() if value is not None}
    changes = {name: v for name, v in {**(usual or {}), **own}.items() if name in INHERITED}
    return dataclasses.replace(config, families=(), start_mix=(), start="random", **changes)


PRESETS = {
    "celo2": MetaConfig(),
    "celo2-base": MetaConfig(rule=CELO2_BASE, learning_rate=1e-4),
}
"""The paper's two meta-training runs, `celo2` and `celo2-base`."""


def from_fields(fields: Mapping[str, Any], base: MetaConfig | None = None) -> MetaConfig:
    """`base` (by default the paper's config) with these fields replaced, checked by type.

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
    """`base` with the fields of a TOML file replaced.

    The rule's are under [rule], a mix under [start_mix], each family under [[families]].
    """
    try:
        return from_fields(tomllib.loads(Path(path).read_text("utf-8")), base)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
