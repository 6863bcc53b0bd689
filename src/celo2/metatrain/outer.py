"""The outer iteration: estimate the meta-gradient over all devices, take an AdamW step."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from celo2.metatrain.config import MetaConfig
from celo2.metatrain.inner import Family
from celo2.metatrain.pes import PESState, estimate, init_state
from celo2.rule import initial_weights
from celo2.runs.mesh import DATA
from celo2.runs.mesh import make_mesh as mesh_over

AXIS = DATA  # problems are what this mesh spreads
CHUNK = 10  # most iterations in one compiled call


class MetaState(NamedTuple):
    """All that decides a run's future, besides its config and data."""

    iteration: Array
    weights: Any  # the rule's arrays by name
    outer: optax.OptState
    pes: PESState  # sharded over the devices, problem by problem


SPECS: Any = (P(), P(), P(), P(AXIS))
LAYOUT = MetaState(*SPECS)


class MetaMetrics(NamedTuple):
    """One outer iteration in numbers."""

    loss: Array  # mean over problems
    family_loss: Array  # mean over the problems of each task of the family
    gradient_norm: Array
    update_norm: Array
    weight_norm: Array
    bad_entries: Array  # gradient entries that were not finite
    inner_steps: Array  # of all problems, both twins


class Program(NamedTuple):
    """A compiled meta-trainer.

    `run` waits for its result and gives the metrics of every iteration, on the host. The state it
    is given is used up.
    """

    abstract: MetaState  # shapes, dtypes and shardings of the state
    init: Callable[[Mapping[str, Any] | None], MetaState]  # weights to start from -> state
    run: Callable[[MetaState, int], tuple[MetaState, MetaMetrics]]  # state, iterations -> …


def make_mesh() -> Mesh:
    """All devices of all processes in one row."""
    return mesh_over({AXIS: jax.device_count()})


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
    # Host arrays: every process has the same ones, and JAX spreads them over the mesh.
    data = jax.device_put(jax.tree.map(np.asarray, family.data), NamedSharding(mesh, P()))
    first = initial_weights(config.rule, np.random.default_rng(config.seed), config.start)
    start = _make_start(config, family, mesh)
    abstract = _with_shardings(jax.eval_shape(start, first), mesh)
    compiled_start = jax.jit(start, out_shardings=jax.tree.map(lambda a: a.sharding, abstract))
    compiled_run = jax.jit(_make_run(config, family, mesh), donate_argnums=1)

    def init(weights: Mapping[str, Any] | None = None) -> MetaState:
        weights = first if weights is None else weights
        return compiled_start({name: np.asarray(w, np.float32) for name, w in weights.items()})

    def run(state: MetaState, iterations: int) -> tuple[MetaState, MetaMetrics]:
        parts = []
        for done in range(0, max(iterations, 1), CHUNK):
            now = min(CHUNK, iterations - done)
            state, rows = compiled_run(data, state, np.int32(now))
            parts.append(jax.tree.map(lambda row, now=now: np.asarray(row)[:now], rows))
        return state, jax.tree.map(lambda *rows: np.concatenate(rows), *parts)

    return Program(abstract, init, run)


def _make_start(config: MetaConfig, family: Family, mesh: Mesh) -> Callable[[Any], MetaState]:
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    numbers = _numbers(config, family, mesh)
    problems = jax.shard_map(
        lambda weights: init_state(config, family, weights, numbers(), key),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(AXIS),
        check_vma=False,
    )

    def start(weights) -> MetaState:
        outer = outer_optimizer(config).init(weights)
        return MetaState(jnp.zeros([], jnp.int32), weights, outer, problems(weights))

    return start


def _make_run(
    config: MetaConfig, family: Family, mesh: Mesh
) -> Callable[[Any, MetaState, Array], tuple[MetaState, MetaMetrics]]:
    numbers = _numbers(config, family, mesh)

    # The number of iterations is no constant of the program: every call then runs the same code,
    # and how a run is cut into calls cannot change its numbers.
    def run(data, state: MetaState, iterations: Array) -> tuple[MetaState, MetaMetrics]:
        def advance(state: MetaState) -> tuple[MetaState, MetaMetrics]:
            return _iterate(config, family, data, state, numbers())

        def one(i, carry):
            state, metrics = advance(carry[0])
            return state, jax.tree.map(lambda row, m: row.at[i].set(m), carry[1], metrics)

        shapes = jax.eval_shape(advance, state)[1]
        rows = jax.tree.map(lambda s: jnp.zeros((CHUNK, *s.shape), s.dtype), shapes)
        return jax.lax.fori_loop(0, iterations, one, (state, rows))

    return jax.shard_map(
        run, mesh=mesh, in_specs=(P(), LAYOUT, P()), out_specs=(LAYOUT, P()), check_vma=False
    )


def _numbers(config: MetaConfig, family: Family, mesh: Mesh) -> Callable[[], Array]:
    """Inside the mapped function: the numbers of this device's problems."""
    local = config.problems * len(family.names) // mesh.size
    return lambda: jax.lax.axis_index(AXIS) * local + jnp.arange(local)


def _iterate(
    config: MetaConfig, family: Family, data, state: MetaState, numbers: Array
) -> tuple[MetaState, MetaMetrics]:
    """One outer iteration, as one device of the mesh sees it."""
    count = config.problems * len(family.names)
    key = jax.random.fold_in(jax.random.key(config.seed), state.iteration + 1)
    pes, found = estimate(config, family, data, state.weights, state.pes, numbers, key)
    by_task = jax.ops.segment_sum(found.losses, pes.problems.index, len(family.names))
    steps = jnp.sum(found.steps).astype(jnp.float32)
    gradient, family_loss, steps = _sum_over_devices((found.gradient, by_task, steps))
    gradient = jax.tree.map(lambda g: g / count, gradient)
    bad = jax.tree.map(lambda g: jnp.sum(~jnp.isfinite(g)), gradient)
    gradient = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0.0), gradient)
    updates, outer = outer_optimizer(config).update(gradient, state.outer, state.weights)
    weights = optax.apply_updates(state.weights, updates)
    metrics = MetaMetrics(
        loss=jnp.sum(family_loss) / count,
        family_loss=family_loss / config.problems,
        gradient_norm=optax.tree.norm(gradient),
        update_norm=optax.tree.norm(updates),
        weight_norm=optax.tree.norm(weights),
        bad_entries=jnp.asarray(optax.tree.sum(bad)),
        inner_steps=2 * steps.astype(jnp.int32),
    )
    return MetaState(state.iteration + 1, weights, outer, pes), metrics


def _sum_over_devices(tree):
    """The tree's sum over the mesh, in a single exchange.

    Several at once may be taken up in another order by another device, and wait for each other.
    """
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.psum(flat, AXIS))


def _with_shardings(shapes: MetaState, mesh: Mesh) -> MetaState:
    def place(part, spec: P):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), part
        )

    return MetaState(*map(place, shapes, SPECS))
