"""Meta-gradients: PES, NRES, truncated ES and full ES from antithetic pairs; backpropagation."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from celo2.metatrain.config import MetaConfig
from celo2.metatrain.families import Family
from celo2.metatrain.inner import (
    Problem,
    final_loss,
    limit_loss,
    sample_length,
    start,
    unroll,
)
from celo2.rule import make_odd, odd_features

NO_PROBLEM = 2**32 - 1  # folded into a key for random numbers that all problems share


class EstimatorState(NamedTuple):
    """All problems of a family, each with the perturbation ξ that its losses are credited to."""

    problems: Problem
    perturbation: dict[str, Array]


class Estimate(NamedTuple):
    """The result of one outer iteration; the gradients are sums over this state's problems."""

    halves: tuple[dict[str, Array], dict[str, Array]]  # over problems of even and of odd number
    squares: Array  # the sum of the squared loss differences
    losses: Array  # the mean loss of each problem's pair
    steps: Array  # how many inner steps each problem advanced


def init_state(family: Family, weights, numbers: Array, key: Array) -> EstimatorState:
    """Problems with these numbers, at random places of their unrolls."""

    def one(number: Array) -> EstimatorState:
        start_key, offset_key = jax.random.split(jax.random.fold_in(key, number))
        problem = start(family, weights, number % len(family.names), start_key)
        truncation = family.config.truncation
        offset = jax.random.randint(offset_key, (), 0, problem.length // truncation) * truncation
        return EstimatorState(problem._replace(step=offset), jax.tree.map(jnp.zeros_like, weights))

    return jax.vmap(one)(numbers)


def estimate(
    family: Family, data, weights, state: EstimatorState, numbers: Array, key: Array
) -> tuple[EstimatorState, Estimate]:
    """The problems after one outer iteration, and the meta-gradient summed over them.

    A problem's random numbers depend on `key` and its number only, not on its device.
    """
    config = family.config
    whole = config.estimator in ("full_es", "backprop")
    if whole:
        length = sample_length(config, jax.random.fold_in(key, NO_PROBLEM))

    def one(state: EstimatorState, number: Array):
        keys = jax.random.split(jax.random.fold_in(key, number), 3)
        fresh = start(family, weights, state.problems.index, keys[0])
        done = state.problems.step >= state.problems.length
        if whole:
            done = jnp.ones_like(done)
        problem = jax.tree.map(lambda new, old: jnp.where(done, new, old), fresh, state.problems)
        if whole:
            problem = problem._replace(length=length)
        if config.estimator == "backprop":
            gradient, loss = differentiate(family, data, weights, problem, keys[2])
            moved, credited, difference = problem._replace(step=length), state.perturbation, 0.0
        else:
            moved, credited, gradient, difference, loss = perturbed(
                family, data, weights, problem, state.perturbation, done, keys[1:]
            )
        steps = moved.step - problem.step
        return EstimatorState(moved, credited), gradient, difference, loss, steps

    state, gradient, difference, losses, steps = jax.vmap(one)(state, numbers)
    odd = (numbers // len(family.names)) % 2 == 1
    halves = [
        jax.tree.map(lambda g, half=half: jnp.einsum("n,n...->...", half, g), gradient)
        for half in (1.0 - odd, 1.0 * odd)
    ]
    squares = jnp.sum(jnp.square(difference))
    return state, Estimate((halves[0], halves[1]), squares, losses, steps)


def perturbed(
    family: Family, data, weights, problem: Problem, before, done: Array, keys: Array
) -> tuple[Problem, Any, Any, Array, Array]:
    """The problem advanced by both twins, and the gradient from the difference of their losses.

    Returns the problem, the perturbation that its losses are credited to, the gradient, the
    weighted difference of the losses and their mean.
    """
    config = family.config
    if config.estimator == "truncated_es":
        problem = with_equal_twins(problem)
    noise, credited = PERTURBATIONS[config.estimator](
        perturb(config, weights, keys[0]), before, done
    )
    twins = jax.tree.map(lambda w, e: jnp.stack([w + e, w - e]), weights, noise)
    if config.estimator == "full_es":
        moved, losses, difference = _unroll_whole(family, data, twins, problem, keys[1])
    else:
        moved, losses = unroll(family, data, twins, problem, keys[1])
        difference = late_weight(config, problem) * (losses[0] - losses[1])
    slope = difference / (2 * config.sigma**2)
    gradient = jax.tree.map(lambda e: slope * e, credited)
    return moved, credited, gradient, difference, jnp.mean(losses)


def differentiate(family: Family, data, weights, problem: Problem, key: Array) -> tuple[Any, Array]:
    """The gradient of the loss at the end of an unroll, scaled to length 1, and that loss.

    The length says more about how chaotic the unroll is than about how useful the gradient is. A
    gradient that is not finite becomes zero.
    """
    loss, gradient = jax.value_and_grad(final_loss, argnums=2)(family, data, weights, problem, key)
    length = optax.tree.norm(gradient)
    sound = jnp.isfinite(length) & (length > 0)
    scale = 1 / jnp.where(sound, length, 1.0)
    gradient = jax.tree.map(lambda g: jnp.where(sound, g * scale, 0.0), gradient)
    return gradient, limit_loss(family, loss)


def late_weight(config: MetaConfig, problem: Problem) -> Array:
    """The weight of the truncation that starts at the problem's step; 1 on average."""
    middle = (problem.step + 0.5 * config.truncation) / problem.length
    return (config.late_weight + 1) * middle**config.late_weight


def _sum_of_all(new, old, done: Array):
    """PES: a fresh perturbation for each truncation; losses are credited to all of the unroll."""
    total = jax.tree.map(lambda n, o: n + jnp.where(done, 0.0, o), new, old)
    return new, total


def _one_per_unroll(new, old, done: Array):
    """NRES: an unroll keeps its first perturbation."""
    kept = jax.tree.map(lambda n, o: jnp.where(done, n, o), new, old)
    return kept, kept


def _newest(new, old, done: Array):
    return new, new


# Each takes a fresh perturbation, the previous one and whether a new unroll starts; it returns the
# perturbation of the weights and the one that losses are credited to.
PERTURBATIONS = {
    "pes": _sum_of_all,
    "nres": _one_per_unroll,
    "truncated_es": _newest,
    "full_es": _newest,
}


def with_equal_twins(problem: Problem) -> Problem:
    """The problem with the second twin reset to the first.

    Truncated ES uses the perturbation of the current truncation only: a difference of the twins
    from earlier ones would be noise.
    """
    params, optimizer = jax.tree.map(
        lambda x: jnp.stack([x[0], x[0]]), (problem.params, problem.optimizer)
    )
    return problem._replace(params=params, optimizer=optimizer)


def perturb(config: MetaConfig, weights, key: Array):
    """Normal noise for every learned weight, independent except within the pairs of odd rules."""
    leaves, treedef = jax.tree.flatten(weights)
    keys = jax.random.split(key, len(leaves))
    noise = [
        config.sigma * jax.random.normal(k, w.shape) for k, w in zip(keys, leaves, strict=True)
    ]
    noise = learned_part(config, treedef.unflatten(noise))
    # `make_odd` takes means of two independent numbers; this restores the deviation σ.
    return jax.tree.map(lambda n: n * math.sqrt(2), noise) if config.odd else noise


def learned_part(config: MetaConfig, change: dict[str, Array]) -> dict[str, Array]:
    """The projection of a change of the weights onto the changes that the config allows."""
    if config.learn != "all":
        learned = ("w0", "g0") if config.learn == "linear" else ("w0", "g0", "b0")
        first = [name for name in learned if name in change]
        carried = {name: change[name].at[..., 2:].set(0.0) for name in first}
        if config.learn == "linear":
            odd = jnp.asarray(odd_features(config.rule), jnp.float32)[:, None]
            carried = {name: odd * value for name, value in carried.items()}
        change = jax.tree.map(jnp.zeros_like, change) | carried
    return make_odd(config.rule, change) if config.odd else change


def _unroll_whole(family: Family, data, twins, problem: Problem, key: Array):
    """A whole unroll with one perturbation, truncation by truncation.

    Returns the problem, the twins' mean losses and their weighted difference.
    """

    def advance(i, carry):
        problem, total, difference = carry
        weight = late_weight(family.config, problem)
        problem, losses = unroll(family, data, twins, problem, jax.random.fold_in(key, i))
        return problem, total + losses, difference + weight * (losses[0] - losses[1])

    truncations = problem.length // family.config.truncation
    carry = (problem, jnp.zeros(2), jnp.zeros(()))
    problem, total, difference = lax.fori_loop(0, truncations, advance, carry)
    return problem, total / truncations, difference / truncations
