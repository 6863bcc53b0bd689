"""Optimizers by name, all with the same schedule, weight decay and clipping."""

import re
from collections.abc import Callable

import optax

from celo2 import baselines
from celo2.evaluate.config import RunConfig
from celo2.evaluate.variants import VARIANTS, Variant, find_variant
from celo2.jax import celo2
from celo2.rule import ADAM_MULTIPLIER, Rule
from celo2.rulefile import as_rule
from celo2.runs.address import import_function

OWN = re.compile(r"[\w.]+:\w+")  # module:function


Make = Callable[[RunConfig, optax.Schedule], optax.GradientTransformation]


def _adamw(config: RunConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return baselines.adamw(
        schedule, weight_decay=config.weight_decay, b1=config.b1, b2=config.b2, eps=config.eps
    )


def _muon(config: RunConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return baselines.muon(
        schedule,
        weight_decay=config.weight_decay,
        adam_learning_rate=_times(config.adam_multiplier or 1.0, schedule),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
    )


def _sgd(config: RunConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(config.b1),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )


def _lion(config: RunConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return optax.lion(schedule, weight_decay=config.weight_decay)


BASELINES: dict[str, Make] = {"adamw": _adamw, "muon": _muon, "sgd": _sgd, "lion": _lion}
OPTIMIZERS = (*VARIANTS, *BASELINES)


def load_rule(name: str) -> Rule | None:
    """The rule that the optimizer called `name` uses; None for one without."""
    if name in BASELINES or OWN.fullmatch(name):
        return None
    try:
        return as_rule(VARIANTS[name].rule if name in VARIANTS else name)
    except FileNotFoundError as error:
        raise ValueError(
            f"optimizer={name!r} is none of {', '.join(OPTIMIZERS)}, no rule file and not "
            f"module:function. {error}"
        ) from error


def make_optimizer(
    config: RunConfig, rule: Rule | None, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """The config's optimizer, clipping included; `rule` is what `load_rule` found."""
    if rule is not None:
        tx = _celo2(config, rule, schedule)
    elif config.optimizer in BASELINES:
        tx = BASELINES[config.optimizer](config, schedule)
    else:
        tx = _own(config, schedule)
    if config.clip is None:
        return tx
    return optax.chain(optax.clip_by_global_norm(config.clip), tx)


def _celo2(config: RunConfig, rule: Rule, schedule: optax.Schedule) -> optax.GradientTransformation:
    variant = find_variant(config.optimizer) or Variant(config.optimizer)
    multiplier = config.adam_multiplier or variant.adam_multiplier or ADAM_MULTIPLIER
    return celo2(
        schedule,
        rule=rule,
        weight_decay=config.weight_decay,
        rms_scale=variant.rms_scale,
        adam_learning_rate=_times(multiplier, schedule),
        adam_b1=config.b1,
        adam_b2=config.b2,
        adam_eps=config.eps,
        adam_nesterov=variant.nesterov,
    )


def _own(config: RunConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    function = import_function(config.optimizer, "optimizer", "my_optimizers:make")
    tx = function(schedule, config.weight_decay)
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(
            f"optimizer={config.optimizer!r} returned a {type(tx).__name__}, not an optax "
            "GradientTransformation."
        )
    return tx


def _times(factor: float, schedule: optax.Schedule) -> optax.Schedule:
    return lambda count: factor * schedule(count)
