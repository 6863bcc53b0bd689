"""The inner problems: pairs of models, trained by a rule with opposite perturbations."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from celo2.jax import celo2
from celo2.metatrain.config import Augmentation, MetaConfig
from celo2.metatrain.families import Family
from celo2.rule import Rule


def sample_scales(
    level: Augmentation, bounds: tuple[float, float], key: Array, params
) -> jax.typing.ArrayLike:
    """A tree of scales for `params`, log-uniform in `bounds`, one for each unit of the level."""
    leaves, treedef = jax.tree.flatten(params)
    low, high = map(math.log, bounds)

    def draw(key: Array, shape: tuple[int, ...]) -> Array:
        return jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))

    if level == "none":
        scales = [jnp.ones(())] * len(leaves)
    elif level == "global":
        scales = [draw(key, ())] * len(leaves)
    else:
        keys = jax.random.split(key, len(leaves))
        shapes = [leaf.shape if level == "parameter" else () for leaf in leaves]
        scales = list(map(draw, keys, shapes))
    return treedef.unflatten(scales)


def shrink(params, scales):
    """The parameters to train: the task's own divided by the scales."""
    return jax.tree.map(lambda p, s: p / s, params, scales)


def expand(params, scales):
    """The parameters the task sees: those trained, times the scales."""
    return jax.tree.map(lambda p, s: p * s, params, scales)


ADAM_B1, ADAM_B2, ADAM_EPSILON = 0.9, 0.95, 1e-8
# Under the root, so that it has a derivative where an element never had a gradient.
ADAM_ROOT_EPSILON = ADAM_EPSILON**2
FINAL_BATCHES = 8  # fresh ones, for the loss at the end of an unroll


class Problem(NamedTuple):
    """One antithetic pair: `params` and `optimizer` have a leading axis of two, θ+ξ and θ−ξ."""

    index: Array  # which task of the family
    params: Any
    scales: Any  # the augmentation
    rate: Array  # the rule's learning rate, before warm-up and decay
    weight_decay: Array
    optimizer: Any
    step: Array
    length: Array


def inner_optimizer(
    family: Family, weights, schedule: optax.Schedule, weight_decay: Array | float = 0.0
) -> optax.GradientTransformation:
    """The optimizer of the inner problems, which is `celo2` as users call it."""
    config = family.config
    settings = (ADAM_B1, ADAM_B2, ADAM_EPSILON, ADAM_ROOT_EPSILON)
    adam = {
        "published": uncorrected_adam(),
        "adam": optax.scale_by_adam(*settings),
        "nesterov": optax.scale_by_adam(*settings, nesterov=True),
    }
    return celo2(
        schedule,
        rule=Rule(config.rule, weights),
        weight_decay=weight_decay,
        adam_learning_rate=lambda count: config.adam_multiplier * schedule(count),
        adam=adam[config.inner_adam],
        kernel="products" if config.estimator == "backprop" else "fused",
        overrides=family.overrides if config.rule.vectors == "adam" else None,
    )


def uncorrected_adam() -> optax.GradientTransformation:
    """Adam without bias correction and with ε inside the root, as in the published trainer."""

    def init(params) -> optax.ScaleByAdamState:
        return optax.ScaleByAdamState(
            jnp.zeros([], jnp.int32), optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        )

    def update(updates, state, params=None):
        del params
        mu = optax.tree.update_moment(updates, state.mu, ADAM_B1, 1)
        nu = optax.tree.update_moment(updates, state.nu, ADAM_B2, 2)
        steps = jax.tree.map(lambda m, v: m * jax.lax.rsqrt(v + ADAM_EPSILON), mu, nu)
        return steps, optax.ScaleByAdamState(optax.safe_increment(state.count), mu, nu)

    return optax.GradientTransformation(init, update)


def start(family: Family, weights, index: Array, key: Array) -> Problem:
    """A fresh problem: new weights, a new scale and a new unroll length."""
    config = family.config
    params_key, scales_key, length_key = jax.random.split(key, 3)
    params = family.init(params_key)
    bounds = config.augmentation_range
    scales = sample_scales(config.augmentation, bounds, scales_key, params)
    scale = jax.tree.leaves(scales)[0]
    rate = sample_rate(config, jax.random.fold_in(key, 3), scale)
    weight_decay = sample_weight_decay(config, jax.random.fold_in(key, 4), scale)
    params = jax.tree.map(lambda p: jnp.stack([p, p]), shrink(params, scales))
    length = sample_length(config, length_key)
    tx = inner_optimizer(family, weights, inner_schedule(config, rate, length))
    optimizer = jax.vmap(tx.init)(params)
    step = jnp.zeros([], jnp.int32)
    return Problem(index, params, scales, rate, weight_decay, optimizer, step, length)


def sample_rate(config: MetaConfig, key: Array, scale: Array) -> Array:
    """The learning rate of a problem whose weights are divided by `scale`."""
    if config.inner_rates is None:
        return jnp.full((), config.inner_learning_rate)
    low, high = map(math.log, config.inner_rates)
    return jnp.exp(jax.random.uniform(key, minval=low, maxval=high)) / scale


def sample_weight_decay(config: MetaConfig, key: Array, scale: Array) -> Array:
    """The weight decay of a problem; its rate is divided by `scale`, so this is multiplied."""
    values = jnp.asarray(config.inner_weight_decays, jnp.float32)
    drawn = values[jax.random.randint(key, (), 0, len(values))]
    return drawn * scale if config.inner_rates and scale.ndim == 0 else drawn


def inner_schedule(config: MetaConfig, rate: Array, length: Array) -> optax.Schedule:
    """The rate at each step of an unroll of that length."""

    def schedule(count: jax.typing.ArrayLike) -> Array:
        now = rate
        count = jnp.asarray(count)
        if config.inner_decay != "constant":
            begin = config.inner_warmup * length
            if config.inner_decay == "late":
                begin = jnp.maximum(begin, length - config.truncation)
            since = jnp.clip((count - begin) / (length - begin), 0.0, 1.0)
            now = now * 0.5 * (1 + jnp.cos(jnp.pi * since))
        if config.inner_warmup:
            # Half a step on, so that the first step is not without effect.
            rise = (count + 0.5) / (config.inner_warmup * length)
            now = now * jnp.minimum(rise, 1.0)
        return now

    return schedule


def sample_length(config: MetaConfig, key: Array) -> Array:
    """An unroll length, log-uniform, rounded to whole truncations."""
    low, high = map(math.log, config.unroll)
    length = jnp.exp(jax.random.uniform(key, minval=low, maxval=high))
    truncations = jnp.maximum(jnp.round(length / config.truncation), 1)
    return truncations.astype(jnp.int32) * config.truncation


def train_step(
    family: Family, weights, problem: Problem, params, optimizer, batch
) -> tuple[Any, Any, Array]:
    """One step of a model: its new parameters and optimizer state, and the loss before."""
    schedule = inner_schedule(family.config, problem.rate, problem.length)

    def loss_of(params) -> Array:
        return family.loss(expand(params, problem.scales), batch)

    loss, grads = jax.value_and_grad(loss_of)(params)
    tx = inner_optimizer(family, weights, schedule, problem.weight_decay)
    updates, optimizer = tx.update(grads, optimizer, params)
    return optax.apply_updates(params, updates), optimizer, loss


def limit_loss(family: Family, loss: Array) -> Array:
    """The loss, limited to the family's highest, which also replaces losses that are not finite."""
    return jnp.minimum(jnp.where(jnp.isfinite(loss), loss, jnp.inf), family.highest_loss)


def unroll(family: Family, data, weights, problem: Problem, key: Array) -> tuple[Problem, Array]:
    """The problem after `truncation` steps, and the mean training loss of each twin.

    `weights` has a leading axis of two; the twins get the same batches.
    """
    config = family.config

    def twin_step(weights, params, optimizer, batch):
        params, optimizer, loss = train_step(family, weights, problem, params, optimizer, batch)
        return params, optimizer, limit_loss(family, loss)

    def step(carry, key):
        params, optimizer, total = carry
        batch = family.sample(data, key, problem.index)
        in_axes = (0, 0, 0, None)
        params, optimizer, loss = jax.vmap(twin_step, in_axes)(weights, params, optimizer, batch)
        return (params, optimizer, total + loss), None

    carry = (problem.params, problem.optimizer, jnp.zeros(2))
    keys = jax.random.split(key, config.truncation)
    (params, optimizer, total), _ = jax.lax.scan(step, carry, keys)
    moved = problem._replace(
        params=params, optimizer=optimizer, step=problem.step + config.truncation
    )
    return moved, total / config.truncation


def final_loss(family: Family, data, weights, problem: Problem, key: Array) -> Array:
    """The loss of the first twin on fresh batches after a whole unroll.

    It is differentiable with respect to the weights, through the last `truncation` steps only:
    beyond a few hundred steps training is chaotic, and the gradient becomes meaningless.
    """
    keys = jax.random.split(key, 3)

    def step(weights, carry, key: Array):
        params, optimizer = carry
        batch = family.sample(data, key, problem.index)
        return train_step(family, weights, problem, params, optimizer, batch)[:2]

    def known_step(i: Array, carry):
        return step(jax.lax.stop_gradient(weights), carry, jax.random.fold_in(keys[0], i))

    # Computed twice rather than kept: a step's intermediate values are many times its state.
    @jax.checkpoint
    def differentiated_step(carry, key: Array):
        return step(weights, carry, key), None

    carry = jax.tree.map(lambda x: x[0], (problem.params, problem.optimizer))
    truncation = family.config.truncation
    carry = jax.lax.fori_loop(0, problem.length - truncation, known_step, carry)
    carry = jax.lax.stop_gradient(carry)
    (params, _), _ = jax.lax.scan(differentiated_step, carry, jax.random.split(keys[1], truncation))

    def loss_on(key: Array) -> Array:
        return family.loss(expand(params, problem.scales), family.sample(data, key, problem.index))

    return jnp.mean(jax.vmap(loss_on)(jax.random.split(keys[2], FINAL_BATCHES)))
