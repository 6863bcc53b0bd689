"""Optimizers by name, all with the same schedules, weight decay and clipping."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from celo2 import baselines
from celo2.evaluate.config import (
    VARIANTS,
    RunConfig,
    Variant,
    find_task,
    find_variant,
)
from celo2.jax import celo, celo2, velo
from celo2.jax.optimizer import route_all, scale_rate
from celo2.rule import ADAM_MULTIPLIER, CELO2, Rule
from celo2.rulefile import as_rule, as_velo_rule, digest
from celo2.runs.fields import import_function
from celo2.velo import VeloRule


def schedule_shape(config: RunConfig, updates: int) -> optax.Schedule:
    """The config's schedule for that many updates, as a fraction of the highest learning rate.

    It rises linearly from zero during the warm-up, and then falls to zero along a cosine or a
    line, or is constant.

    >>> shape = schedule_shape(RunConfig("digits-mlp", schedule="linear", warmup=0.2), 10)
    >>> [round(float(shape(count)), 2) for count in (0, 1, 2, 6, 10)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    warmup = round(config.warmup * updates)
    rest = max(1, updates - warmup)
    decay = {
        "cosine": optax.cosine_decay_schedule(1.0, rest),
        "linear": optax.linear_schedule(1.0, 0.0, rest),
        "constant": optax.constant_schedule(1.0),
    }[config.schedule]
    if warmup == 0:
        return decay
    return optax.join_schedules([optax.linear_schedule(0.0, 1.0, warmup), decay], [warmup])


OWN_FUNCTION = re.compile(r"[\w.]+:\w+")  # module:function

Make = Callable[[RunConfig, optax.Schedule], optax.GradientTransformation]


def _adamw(config: RunConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return baselines.adamw(
        schedule, weight_decay=config.weight_decay, b1=config.b1, b2=config.b2, eps=config.eps
    )


def _muon(config: RunConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    return baselines.muon(
        schedule,
        weight_decay=config.weight_decay,
        adam_learning_rate=scale_rate(config.adam_multiplier or 1.0, schedule),
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


BASELINES: dict[str, Make] = {
    "adamw": _adamw,
    "muon": _muon,
    "sgd": _sgd,
    "lion": lambda config, schedule: optax.lion(schedule, weight_decay=config.weight_decay),
}
OPTIMIZERS = (*VARIANTS, *BASELINES)


def load_rule(name: str) -> Rule | None:
    """The rule of the optimizer called `name`; None for one without a rule."""
    if name in BASELINES or OWN_FUNCTION.fullmatch(name):
        return None
    variant = find_variant(name) or Variant(name)
    try:
        if variant.optimizer != "celo2":
            return as_velo_rule(variant.rule, variant.optimizer)
        return as_rule(variant.rule)
    except FileNotFoundError as error:
        if variant.optimizer != "celo2":
            raise ValueError(
                f"optimizer={name!r} needs a rule file for {variant.optimizer}, which `celo2 "
                f"convert` makes of a published checkpoint. {error}"
            ) from error
        raise ValueError(
            f"optimizer={name!r} is none of {', '.join(OPTIMIZERS)}, no rule file and not "
            f"velo=FILE, celo=FILE or module:function. {error}"
        ) from error


def digest_rule(rule: Rule | None) -> str | None:
    """The SHA-256 of a rule; None without one."""
    return None if rule is None else digest(rule)


def make_optimizer(
    config: RunConfig, rule: Rule | None, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """The config's optimizer with its clipping; `rule` is from `load_rule`."""
    if isinstance(rule, VeloRule):
        tx = _lstm(config, rule, schedule)
    elif rule is not None:
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
        scale=config.scale,
        adam_learning_rate=scale_rate(multiplier, schedule),
        adam_b1=config.b1,
        adam_b2=config.b2,
        adam_eps=config.eps,
        adam_nesterov=variant.nesterov,
    )


def _lstm(
    config: RunConfig, rule: VeloRule, schedule: optax.Schedule
) -> optax.GradientTransformation:
    assert config.steps is not None
    updates = config.steps * find_task(config.task).updates_per_step
    make = {"velo": velo, "celo": celo}[rule.config.optimizer]
    return make(updates, rule=rule, learning_rate=schedule, weight_decay=config.weight_decay)


def _own(config: RunConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    function = import_function(config.optimizer, "optimizer", "my_optimizers:make")
    tx = function(schedule, config.weight_decay)
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(
            f"optimizer={config.optimizer!r} returned a {type(tx).__name__}, not an optax "
            "GradientTransformation."
        )
    return tx


GROUPS = {"rule": "hidden", "adam": "other"}


class NormState(NamedTuple):
    """The optimizer's own state, and the root mean squares of its latest update."""

    inner: optax.OptState
    norms: dict[str, dict[str, Array]]  # update_rms and param_rms, by group


def with_norms(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`tx` with a state that also has the RMS of its latest update and of the parameters before.

    Groups are the same for all optimizers: `hidden` matrices, which Celo2's rule and Muon update,
    and `other` tensors, which both leave to AdamW.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params):
        zero = jax.tree.map(lambda _: jnp.zeros(()), _norms(params, params))
        return NormState(tx.init(params), zero)

    def update(updates, state, params=None, **extra_args):
        updates, inner = tx.update(updates, state.inner, params, **extra_args)
        return updates, NormState(inner, _norms(updates, params))

    return optax.GradientTransformationExtraArgs(init, update)


def group_leaves(params: Any) -> dict[str, list[Any]]:
    """The leaves of each group; a group without any is left out."""
    groups: dict[str, list[Any]] = {}
    for route, leaf in zip(route_all(params, CELO2), jax.tree.leaves(params), strict=True):
        groups.setdefault(GROUPS[route.updater], []).append(leaf)
    return groups


def _norms(updates: Any, params: Any) -> dict[str, dict[str, Array]]:
    return {"update_rms": _rms(updates), "param_rms": _rms(params)}


def _rms(tree: Any) -> dict[str, Array]:
    return {
        group: jnp.sqrt(
            sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves)
            / max(1, sum(leaf.size for leaf in leaves))
        )
        for group, leaves in group_leaves(tree).items()
    }
