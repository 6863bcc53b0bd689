"""The outer iteration: estimate the meta-gradient over all devices, take an AdamW step."""

import time
from collections.abc import Callable, Mapping, Sequence
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
from celo2.metatrain.estimators import EstimatorState, estimate, init_state, learned_part
from celo2.metatrain.families import Family
from celo2.rule import initial_weights, make_odd
from celo2.runs.processes import DATA

DEVIATION_DECAY = 0.99  # of the running mean square of loss differences


class MetaState(NamedTuple):
    """The state of a run: with config and data, it determines everything that follows."""

    iteration: Array
    weights: Any  # the rule's arrays by name
    average: Any  # their running average, which is the rule that is saved
    outer: optax.OptState
    squares: Array  # running mean square of each family's loss differences
    problems: tuple[EstimatorState, ...]  # of each family, sharded problem by problem


class MetaMetrics(NamedTuple):
    """The metrics of outer iterations."""

    loss: Array  # mean over problems
    family_loss: Array  # mean over the problems of each task of each family
    gradient_norm: Array
    agreement: Array  # cosine between the meta-gradients of two halves of the problems
    update_norm: Array
    weight_norm: Array
    bad_entries: Array  # gradient entries that were not finite
    inner_steps: Array  # of all problems, both twins
    seconds: Array  # spent on each family


class Program(NamedTuple):
    """A compiled meta-trainer.

    `run` blocks and returns the metrics of every iteration on the host. Its state is donated.
    """

    abstract: MetaState  # shapes, dtypes and shardings of the state
    init: Callable[[Mapping[str, Any] | None], MetaState]  # weights to start from -> state
    run: Callable[[MetaState, int], tuple[MetaState, MetaMetrics]]  # state, iterations -> …


class Contribution(NamedTuple):
    """What one family adds to an iteration, summed over its problems and all devices."""

    halves: tuple[Any, Any]
    squares: Array
    losses: Array  # of each task
    steps: Array


def outer_optimizer(config: MetaConfig) -> optax.GradientTransformation:
    """AdamW as in the paper, with an optional warm-up, cosine decay and clipping."""
    rate: optax.Schedule | float = config.learning_rate
    if config.decay == "cosine":
        rate = optax.warmup_cosine_decay_schedule(
            0.0 if config.warmup else rate, rate, config.warmup, config.iterations
        )
    elif config.warmup:
        rate = optax.linear_schedule(0.0, rate, config.warmup)
    adamw = optax.adamw(rate, 0.9, 0.999, 1e-8, weight_decay=config.weight_decay)
    if config.clip is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def build(config: MetaConfig, families: Sequence[Family], mesh: Mesh) -> Program:
    """The run's program: problems are sharded over the mesh, everything else is replicated.

    Each family has a compiled function of its own, so that its time can be measured.
    """
    for family in families:
        if family.problems % mesh.size:
            raise ValueError(
                f"{family.problems} problems of {family.names[0]} ({family.config.problems} for "
                f"each of {len(family.names)} tasks) cannot be shared by {mesh.size} devices: set "
                "problems so that they divide."
            )
    everywhere = NamedSharding(mesh, P())
    # Host arrays: every process has the same ones, and JAX distributes them over the mesh.
    data = [jax.device_put(jax.tree.map(np.asarray, f.data), everywhere) for f in families]
    first = initial_weights(
        config.rule, np.random.default_rng(config.seed), dict(config.start_mix) or config.start
    )
    start = _make_start(config, families, mesh)
    abstract = _with_shardings(jax.eval_shape(start, first), mesh)
    compiled_start = jax.jit(start, out_shardings=jax.tree.map(lambda a: a.sharding, abstract))
    offsets = np.cumsum([0, *(family.problems for family in families)])
    advances = [
        jax.jit(_make_advance(config, family, int(offset), mesh), donate_argnums=3)
        for family, offset in zip(families, offsets, strict=False)
    ]
    finish = jax.jit(_make_finish(config, families), donate_argnums=0)

    def init(weights: Mapping[str, Any] | None = None) -> MetaState:
        weights = first if weights is None else weights
        if config.odd:
            weights = make_odd(config.rule, weights)
        return compiled_start({name: np.asarray(w, np.float32) for name, w in weights.items()})

    def iterate(state: MetaState) -> tuple[MetaState, MetaMetrics]:
        problems, found, seconds = [], [], []
        for advance, arrays, old in zip(advances, data, state.problems, strict=True):
            began = time.monotonic()
            new, each = advance(arrays, state.iteration, state.weights, old)
            # One collective at a time: queued ones can wait for each other on CPU devices.
            jax.block_until_ready(each)
            seconds.append(time.monotonic() - began)
            problems.append(new)
            found.append(each)
        rest, metrics = finish(state._replace(problems=()), found)
        metrics = jax.tree.map(np.asarray, metrics)._replace(seconds=np.array(seconds))
        return rest._replace(problems=tuple(problems)), metrics

    def run(state: MetaState, iterations: int) -> tuple[MetaState, MetaMetrics]:
        rows = []
        for _ in range(iterations):
            state, metrics = iterate(state)
            rows.append(metrics)
        return state, jax.tree.map(lambda *parts: np.stack(parts), *rows)

    return Program(abstract, init, run)


def _make_start(
    config: MetaConfig, families: Sequence[Family], mesh: Mesh
) -> Callable[[Any], MetaState]:
    key = jax.random.fold_in(jax.random.key(config.seed), 0)

    def problems_of(family: Family, offset: int):
        numbers = _problem_numbers(family, offset, mesh)
        return jax.shard_map(
            lambda weights: init_state(family, weights, numbers(), key),
            mesh=mesh,
            in_specs=P(),
            out_specs=P(DATA),
            check_vma=False,
        )

    def start(weights) -> MetaState:
        outer = outer_optimizer(config).init(weights)
        problems, offset = [], 0
        for family in families:
            problems.append(problems_of(family, offset)(weights))
            offset += family.problems
        average = jax.tree.map(jnp.array, weights)
        squares = jnp.zeros(len(families))
        return MetaState(
            jnp.zeros([], jnp.int32), weights, average, outer, squares, tuple(problems)
        )

    return start


def _make_advance(config: MetaConfig, family: Family, offset: int, mesh: Mesh) -> Callable:
    """(data, iteration, weights, problems) -> the advanced problems and their contribution."""
    numbers = _problem_numbers(family, offset, mesh)

    def advance(data, iteration: Array, weights, problems: EstimatorState):
        key = jax.random.fold_in(jax.random.key(config.seed), iteration + 1)
        problems, each = estimate(family, data, weights, problems, numbers(), key)
        by_task = jax.ops.segment_sum(each.losses, problems.problems.index, len(family.names))
        steps = jnp.sum(each.steps).astype(jnp.float32)
        return problems, _sum_over_devices(Contribution(each.halves, each.squares, by_task, steps))

    return jax.shard_map(
        advance,
        mesh=mesh,
        in_specs=(P(), P(), P(), P(DATA)),
        out_specs=(P(DATA), P()),
        check_vma=False,
    )


def _problem_numbers(family: Family, offset: int, mesh: Mesh) -> Callable[[], Array]:
    """Inside the mapped function: the numbers of this device's problems."""
    local = family.problems // mesh.size
    return lambda: offset + jax.lax.axis_index(DATA) * local + jnp.arange(local)


def _make_finish(config: MetaConfig, families: Sequence[Family]) -> Callable:
    """(state without problems, contributions) -> the state after an AdamW step, and metrics."""
    total = sum(family.problems for family in families)
    twins = 1 if config.estimator == "backprop" else 2

    def finish(state: MetaState, found: list[Contribution]) -> tuple[MetaState, MetaMetrics]:
        means = jnp.stack(
            [each.squares / f.problems for each, f in zip(found, families, strict=True)]
        )
        decay = jnp.where(state.iteration == 0, 0.0, DEVIATION_DECAY)
        means = jnp.where(jnp.isfinite(means), means, state.squares)
        squares = decay * state.squares + (1 - decay) * means
        halves = [_mix(config, families, found, squares, half) for half in (0, 1)]
        halves = [learned_part(config, half) for half in halves]
        gradient = jax.tree.map(lambda a, b: a + b, *halves)
        bad = jax.tree.map(lambda g: jnp.sum(~jnp.isfinite(g)), gradient)
        gradient = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0.0), gradient)
        updates, outer = outer_optimizer(config).update(gradient, state.outer, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        # At first nearly a plain mean, so that the initial weights are forgotten.
        keep = jnp.minimum(config.averaging, state.iteration / (state.iteration + 10.0))
        average = jax.tree.map(lambda a, w: keep * a + (1 - keep) * w, state.average, weights)
        losses = jnp.concatenate([each.losses for each in found])
        metrics = MetaMetrics(
            loss=jnp.sum(losses) / total,
            family_loss=jnp.concatenate(
                [each.losses / f.config.problems for each, f in zip(found, families, strict=True)]
            ),
            gradient_norm=optax.tree.norm(gradient),
            agreement=_cosine(*halves),
            update_norm=optax.tree.norm(updates),
            weight_norm=optax.tree.norm(weights),
            bad_entries=jnp.asarray(optax.tree.sum(bad)),
            inner_steps=twins * jnp.stack([each.steps for each in found]).sum().astype(jnp.int32),
            seconds=jnp.zeros(len(families)),
        )
        state = MetaState(state.iteration + 1, weights, average, outer, squares, ())
        return state, metrics

    return finish


def _mix(
    config: MetaConfig,
    families: Sequence[Family],
    found: list[Contribution],
    squares: Array,
    half: int,
) -> Any:
    """The mean of the families' gradients over one half of their problems."""
    total = None
    for i, (family, each) in enumerate(zip(families, found, strict=True)):
        scale = family.weight / (family.problems * len(families))
        if config.balance == "deviation":
            # Times σ, so that the gradient keeps the scale that rates were chosen for.
            scale = scale * config.sigma * jax.lax.rsqrt(squares[i] + 1e-30)
        part = jax.tree.map(lambda g, scale=scale: scale * g, each.halves[half])
        total = part if total is None else jax.tree.map(lambda a, b: a + b, total, part)
    return total


def _cosine(a, b) -> Array:
    norms = optax.tree.norm(a) * optax.tree.norm(b)
    return jnp.asarray(optax.tree.vdot(a, b)) / jnp.maximum(norms, 1e-30)


def _sum_over_devices(tree):
    """The tree's sum over the mesh, in a single collective.

    Devices may start several in different orders, and would then wait for each other forever.
    """
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.psum(flat, DATA))


def _with_shardings(shapes: MetaState, mesh: Mesh) -> MetaState:
    def place(tree, spec: P):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree
        )

    rest = place(shapes._replace(problems=()), P())
    return rest._replace(problems=place(shapes.problems, P(DATA)))
