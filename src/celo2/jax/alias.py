"""The optimizers people use: the rule on hidden matrices, AdamW on the rest."""

import functools
import inspect
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from celo2.jax.optimizer import scale_by_celo2
from celo2.jax.trees import check_leaves, check_overrides_match, leaf_routes
from celo2.routing import Overrides, Route
from celo2.rule import ADAM_MULTIPLIER, Rule, RuleConfig
from celo2.rulefile import as_rule

ScalarOrSchedule = float | Array | optax.Schedule
Mask = Any | Callable[[optax.Params], Any]


def celo2(
    learning_rate: ScalarOrSchedule,
    *,
    rule: Rule | str | Path = "celo2",
    weight_decay: float | Array = 0.0,
    weight_decay_mask: Mask | None = None,
    rms_scale: float | Array = 1.0,
    adam_learning_rate: ScalarOrSchedule | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
    adam_eps: float = 1e-8,
    adam_nesterov: bool = False,
    adam: optax.GradientTransformation | None = None,
    adam_mask: Mask | None = None,
    overrides: Overrides | None = None,
    published: bool = False,
    skip_nonfinite: bool | None = None,
    hold_unused: bool | None = None,
    momentum_dtype: Any = None,
    newton_schulz_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Celo2: the learned rule on hidden matrices; AdamW on vectors, embeddings and the head.

    `celo2.jax.explain(params)` shows who updates what.

    Args:
        learning_rate: the RMS of the rule's step, or a schedule; 1e-4 … 1e-3 is usual.
        rule: a Rule, the name of a shipped one, a rule file or an hf:// address.
        weight_decay: decoupled, multiplied by the learning rate of each branch.
        weight_decay_mask: a tree of booleans, or a function of the params that returns one.
        rms_scale: a further factor on the rule's updates, 0.2 for the "RMS×0.2" variant.
        adam_learning_rate: AdamW's rate or schedule; 8 times `learning_rate` by default.
        adam_b1, adam_b2, adam_eps: AdamW's other settings.
        adam_nesterov: whether AdamW looks ahead with Nesterov's momentum, as optax's Muon has it.
        adam: a transformation to use in place of `optax.scale_by_adam` with these settings.
        adam_mask: a tree of booleans, True where AdamW updates, or a function of the params
            that returns one. Decides alone who updates what.
        overrides: regex on a parameter's path → "rule", "adam", a MatrixView or Muon's
            dimension numbers; the first that matches counts.
        skip_nonfinite: what `scale_by_celo2` says of the rule; AdamW takes elements of a gradient
            that are not finite for zeros.
        published, hold_unused, momentum_dtype, newton_schulz_dtype: see `scale_by_celo2`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from celo2.jax import celo2
        >>> params = {"hidden": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
        >>> tx = celo2(optax.cosine_decay_schedule(5e-4, 1000), weight_decay=0.1)
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> params = optax.apply_updates(params, updates)
    """
    rule = as_rule(rule)
    skip_nonfinite = not published if skip_nonfinite is None else skip_nonfinite
    adam = adam or optax.scale_by_adam(adam_b1, adam_b2, adam_eps, nesterov=adam_nesterov)

    def labels(tree) -> Any:
        routes = route_all(tree, rule.config, adam_mask, overrides, published)
        return jax.tree.structure(tree).unflatten([route.updater for route in routes])

    branches: dict[Hashable, optax.GradientTransformation] = {
        "rule": optax.chain(
            scale_by_celo2(
                rule,
                overrides=overrides,
                published=published,
                skip_nonfinite=skip_nonfinite,
                hold_unused=hold_unused,
                momentum_dtype=momentum_dtype,
                newton_schulz_dtype=newton_schulz_dtype,
            ),
            optax.scale(rms_scale),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        ),
        "adam": optax.chain(
            _without_nonfinite(adam) if skip_nonfinite else adam,
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(
                _times(ADAM_MULTIPLIER, learning_rate)
                if adam_learning_rate is None
                else adam_learning_rate
            ),
        ),
    }
    tx = optax.partition(branches, labels)

    def init(params: optax.Params) -> optax.OptState:
        check_leaves(params)
        check_overrides_match(overrides, params)
        return tx.init(params)

    return optax.GradientTransformationExtraArgs(init, tx.update)


def _without_nonfinite(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` with zeros for the elements of gradients that are not finite; it has the same state."""
    tx = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra):
        finite = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, jnp.zeros_like(g)), updates)
        return tx.update(finite, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def celo2_base(
    learning_rate: ScalarOrSchedule, *, rule: Rule | str | Path = "celo2-base", **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Celo2-base: the learned rule on every tensor, without orthogonalization.

    Only single-element tensors go to AdamW. Takes the options of `celo2`.

    Example:
        >>> import jax.numpy as jnp
        >>> from celo2.jax import celo2_base
        >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
        >>> state = celo2_base(3e-4).init(params)
    """
    return celo2(learning_rate, rule=rule, **options)


# Spelt out for `optax.inject_hyperparams` and for help(), which both read the signature.
celo2_base.__signature__ = inspect.signature(functools.partial(celo2, rule="celo2-base"))


def route_all(
    tree,
    config: RuleConfig,
    adam_mask: Mask | None = None,
    overrides: Overrides | None = None,
    published: bool = False,
) -> list[Route]:
    """The route of every leaf, the user's mask included."""
    routes = leaf_routes(tree, config, overrides, published)
    if adam_mask is None or not routes:
        return routes
    # A tree may be callable too, an equinox module for one.
    is_function = callable(adam_mask) and jax.tree_util.all_leaves([adam_mask])
    mask = adam_mask(tree) if is_function else adam_mask
    chosen = jax.tree.map(lambda adam, part: jax.tree.map(lambda _: adam, part), mask, tree)
    return [
        route._replace(updater="adam" if adam else "rule", reason="adam_mask")
        for route, adam in zip(routes, jax.tree.leaves(chosen), strict=True)
    ]


def _times(factor: float, rate: ScalarOrSchedule) -> ScalarOrSchedule:
    if callable(rate):
        return lambda count: factor * rate(count)
    return factor * rate
