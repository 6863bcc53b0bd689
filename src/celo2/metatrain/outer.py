"""The outer iteration: estimate the meta-gradient over all devices, take an AdamW step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from celo2.metatrain.config import MetaConfig
from celo2.metatrain.inner import Family
from celo2.metatrain.pes import PESState, estimate, init_state
from celo2.rule import initial_weights

AXIS = "problems"


class MetaState(NamedTuple):
    """All that decides a run's future, besides its config and data."""

    iteration: Array
    weights: dict[str, Array]
    outer: optax.OptState
    pes: PESState  # sharded over the devices, problem by problem


class MetaMetrics(NamedTuple):
    """One outer iteration in numbers."""

    loss: Array  # mean over problems
    family_loss: Array  # mean over the problems of each task of the family
    gradient_norm: Array
    update_norm: Array
    weight_norm: Array
    bad_entries: Array  # gradient entries that were not finite


class Program(NamedTuple):
    """A compiled meta-trainer."""

    init: Callable[[dict[str, Any] | None], MetaState]  # weights to start from -> state
    run: Callable[[MetaState, int], tuple[MetaState, MetaMetrics]]  # state, iterations -> …


def make_mesh() -> Mesh:
    """All devices of all processes in one row."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


def outer_optimizer(config: MetaConfig) -> optax.GradientTransformation:
    """AdamW as in the paper, with an optional warm-up and cosine decay."""
    rate: optax.Schedule | float = config.learning_rate
    if config.decay == "cosine":
        rate = optax.warmup_cosine_decay_schedule(
            0.0 if config.warmup else rate, rate, config.warmup, config.iterations
        )
    elif config.warmup:
        rate = optax.linear_schedule(0.0, rate, config.warmup)
    return optax.adamw(rate, 0.9, 0.999, 1e-8, weight_decay=config.weight_decay)


def build(config: MetaConfig, family: Family, mesh: Mesh) -> Program:
    """The run's program: problems are spread over the mesh, all else is on every device."""
    count = config.problems * len(family.names)
    if count % mesh.size:
        raise ValueError(
            f"{count} problems ({config.problems} for each of {len(family.names)} datasets) "
            f"cannot be shared by {mesh.size} devices: set problems so that they divide."
        )
    tx = outer_optimizer(config)
    root = jax.random.key(config.seed)
    layout = MetaState(P(), P(), P(), P(AXIS))
    place = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), layout, is_leaf=lambda x: isinstance(x, P)
    )

    def numbers() -> Array:
        local = count // mesh.size
        return jax.lax.axis_index(AXIS) * local + jnp.arange(local)

    def init_problems(weights) -> PESState:
        return init_state(config, family, weights, numbers(), jax.random.fold_in(root, 0))

    def iterate(data, state: MetaState) -> tuple[MetaState, MetaMetrics]:
        key = jax.random.fold_in(root, state.iteration + 1)
        pes, found = estimate(config, family, data, state.weights, state.pes, numbers(), key)
        gradient = jax.tree.map(lambda g: jax.lax.psum(g, AXIS) / count, found.gradient)
        bad = sum(jnp.sum(~jnp.isfinite(g)) for g in jax.tree.leaves(gradient))
        gradient = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0.0), gradient)
        updates, outer = tx.update(gradient, state.outer, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        family_loss = jax.lax.psum(
            jax.ops.segment_sum(found.losses, pes.problems.index, len(family.names)), AXIS
        )
        metrics = MetaMetrics(
            loss=jnp.sum(family_loss) / count,
            family_loss=family_loss / config.problems,
            gradient_norm=optax.tree.norm(gradient),
            update_norm=optax.tree.norm(updates),
            weight_norm=optax.tree.norm(weights),
            bad_entries=bad,
        )
        return MetaState(state.iteration + 1, weights, outer, pes), metrics

    def many(data, state: MetaState, iterations: int):
        def mapped(data, state):
            return jax.lax.scan(lambda s, _: iterate(data, s), state, length=iterations)

        shard = jax.shard_map(
            mapped, mesh=mesh, in_specs=(P(), layout), out_specs=(layout, P()), check_vma=False
        )
        return shard(data, state)

    data = jax.device_put(family.data, NamedSharding(mesh, P()))
    compiled = jax.jit(many, static_argnums=2, donate_argnums=1)

    def init(weights: dict[str, Any] | None = None) -> MetaState:
        if weights is None:
            weights = initial_weights(config.rule, np.random.default_rng(config.seed))
        weights = {name: jnp.asarray(w, jnp.float32) for name, w in weights.items()}

        def make(weights) -> MetaState:
            problems = jax.shard_map(
                init_problems, mesh=mesh, in_specs=P(), out_specs=P(AXIS), check_vma=False
            )
            zero = jnp.zeros([], jnp.int32)
            return MetaState(zero, weights, tx.init(weights), problems(weights))

        shapes = jax.eval_shape(make, weights)
        shardings = MetaState(
            *(
                jax.tree.map(lambda _, s=sharding: s, part)
                for part, sharding in zip(shapes, place, strict=True)
            )
        )
        return jax.jit(make, out_shardings=shardings)(weights)

    return Program(init, lambda state, iterations: compiled(data, state, iterations))
