"""The inner problems: models trained by a rule and by its mirror image, side by side."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from celo2.jax import celo2
from celo2.metatrain.augment import expand, sample_scales, shrink
from celo2.metatrain.config import MetaConfig
from celo2.rule import Rule
from celo2.tasks import ImageSet, Task, mlp, sample_batch
from celo2.tasks.images import bank
from celo2.tasks.layers import cross_entropy

ADAM_B1, ADAM_B2, ADAM_EPSILON = 0.9, 0.95, 1e-8
EVERY_MATRIX: Mapping[str, str] = {"head.*kernel": "rule"}


class Family(NamedTuple):
    """The tasks problems are drawn from, told apart by an index."""

    names: tuple[str, ...]
    init: Callable[[Array], Any]  # key -> params
    sample: Callable[[Any, Array, Array], Any]  # data, key, index -> batch
    loss: Callable[[Any, Any], Array]  # params, batch -> scalar
    data: Any
    overrides: Mapping[str, str] | None = EVERY_MATRIX  # of who updates what


class Problem(NamedTuple):
    """One antithetic pair: `params` and `optimizer` have a leading axis of two, θ+ξ and θ−ξ."""

    index: Array  # which task of the family
    params: Any
    scales: Any  # the augmentation
    rate: Array  # the rule's learning rate, before any decay
    optimizer: Any
    step: Array
    length: Array


def image_family(sets: tuple[ImageSet, ...], batch: int) -> Family:
    """MLPs 64–32–10 on several image sets, one index each."""

    def loss(params, xy) -> Array:
        x, y = xy
        return cross_entropy(mlp.logits(params, x), y)

    return Family(
        names=tuple(s.name for s in sets),
        init=mlp.init,
        sample=lambda data, key, index: sample_batch(data, key, index, batch),
        loss=loss,
        data=bank(sets),
    )


def task_family(task: Task, name: str) -> Family:
    """A family of one task, whose tensors are updated by whom `celo2` would choose."""
    return Family(
        names=(name,),
        init=task.init,
        sample=lambda data, key, index: task.sample(data, key, "train"),
        loss=lambda params, batch: task.loss(params, batch)[0],
        data=task.data,
        overrides=None,
    )


def inner_optimizer(
    config: MetaConfig,
    weights,
    schedule: optax.Schedule,
    overrides: Mapping[str, str] | None = EVERY_MATRIX,
) -> optax.GradientTransformation:
    """What trains the inner problems: the optimizer users call, by default on every matrix."""
    return celo2(
        schedule,
        rule=Rule(config.rule, weights),
        adam_learning_rate=lambda count: config.adam_multiplier * schedule(count),
        adam=uncorrected_adam(),
        overrides=overrides if config.rule.vectors == "adam" else None,
    )


def uncorrected_adam() -> optax.GradientTransformation:
    """Adam without bias correction and with ε inside the root, as the published trainer has it."""

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


def start(config: MetaConfig, family: Family, weights, index: Array, key: Array) -> Problem:
    """A fresh problem: new weights, a new scale and a new unroll length."""
    params_key, scales_key, length_key = jax.random.split(key, 3)
    params = family.init(params_key)
    bounds = config.augmentation_range
    scales = sample_scales(config.augmentation, bounds, scales_key, params)
    rate = sample_rate(config, jax.random.fold_in(key, 3), jax.tree.leaves(scales)[0])
    params = jax.tree.map(lambda p: jnp.stack([p, p]), shrink(params, scales))
    length = sample_length(config, length_key)
    tx = inner_optimizer(config, weights, inner_schedule(config, rate, length), family.overrides)
    step = jnp.zeros([], jnp.int32)
    return Problem(index, params, scales, rate, jax.vmap(tx.init)(params), step, length)


def sample_rate(config: MetaConfig, key: Array, scale: Array) -> Array:
    """The learning rate of a problem whose weights are divided by `scale`."""
    if config.inner_rates is None:
        return jnp.full((), config.inner_learning_rate)
    low, high = map(math.log, config.inner_rates)
    return jnp.exp(jax.random.uniform(key, minval=low, maxval=high)) / scale


def inner_schedule(config: MetaConfig, rate: Array, length: Array) -> optax.Schedule:
    """The rate at each step of an unroll of that length."""
    if config.inner_decay == "constant":
        return lambda count: rate
    return lambda count: rate * 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(count / length, 1.0)))


def sample_length(config: MetaConfig, key: Array) -> Array:
    """An unroll length, log-uniform, rounded to whole truncations."""
    low, high = map(math.log, config.unroll)
    length = jnp.exp(jax.random.uniform(key, minval=low, maxval=high))
    truncations = jnp.maximum(jnp.round(length / config.truncation), 1)
    return truncations.astype(jnp.int32) * config.truncation


def unroll(
    config: MetaConfig, family: Family, data, weights, problem: Problem, key: Array
) -> tuple[Problem, Array]:
    """The problem `truncation` steps on, and the mean training loss of either twin.

    `weights` has a leading axis of two; the twins see the same batches.
    """

    schedule = inner_schedule(config, problem.rate, problem.length)

    def twin_step(weights, params, optimizer, batch):
        def loss_of(params) -> Array:
            return family.loss(expand(params, problem.scales), batch)

        loss, grads = jax.value_and_grad(loss_of)(params)
        tx = inner_optimizer(config, weights, schedule, family.overrides)
        updates, optimizer = tx.update(grads, optimizer, params)
        loss = jnp.where(jnp.isfinite(loss), loss, config.highest_loss)
        loss = jnp.minimum(loss, config.highest_loss)
        return optax.apply_updates(params, updates), optimizer, loss

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
