"""Meta-gradients from antithetic pairs: PES, truncated ES and full ES."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from celo2.metatrain.config import MetaConfig
from celo2.metatrain.inner import Family, Problem, sample_length, start, unroll

NO_PROBLEM = 2**32 - 1  # folded into a key for what all problems share


class PESState(NamedTuple):
    """All problems, each with the sum ξ of the perturbations of its unroll so far."""

    problems: Problem
    perturbation: dict[str, Array]


class Estimate(NamedTuple):
    """What one outer iteration learned; the gradient is a sum over this state's problems."""

    gradient: dict[str, Array]
    losses: Array  # the mean loss of each problem's pair
    steps: Array  # by which each problem advanced


def init_state(config: MetaConfig, family: Family, weights, numbers: Array, key: Array) -> PESState:
    """Problems with these numbers, each somewhere in its unroll so that they don't run in step."""

    def one(number: Array) -> PESState:
        start_key, offset_key = jax.random.split(jax.random.fold_in(key, number))
        problem = start(config, family, weights, number % len(family.names), start_key)
        truncations = problem.length // config.truncation
        offset = jax.random.randint(offset_key, (), 0, truncations) * config.truncation
        return PESState(problem._replace(step=offset), jax.tree.map(jnp.zeros_like, weights))

    return jax.vmap(one)(numbers)


def estimate(
    config: MetaConfig, family: Family, data, weights, state: PESState, numbers: Array, key: Array
) -> tuple[PESState, Estimate]:
    """One outer iteration's problems advanced, and the meta-gradient summed over them.

    A problem's random numbers depend on `key` and its number alone, not on which device has it.
    """
    if config.estimator == "full_es":
        length = sample_length(config, jax.random.fold_in(key, NO_PROBLEM))

    def one(state: PESState, number: Array) -> tuple[PESState, Estimate]:
        keys = jax.random.split(jax.random.fold_in(key, number), 3)
        fresh = start(config, family, weights, state.problems.index, keys[0])
        done = state.problems.step >= state.problems.length
        if config.estimator == "full_es":
            done = jnp.ones_like(done)
        problem = jax.tree.map(lambda new, old: jnp.where(done, new, old), fresh, state.problems)
        if config.estimator == "truncated_es":
            problem = with_equal_twins(problem)
        noise = perturb(config, weights, keys[1])
        kept = jnp.where(done | (config.estimator != "pes"), 0.0, 1.0)
        total = jax.tree.map(lambda old, new: kept * old + new, state.perturbation, noise)
        twins = jax.tree.map(lambda w, e: jnp.stack([w + e, w - e]), weights, noise)
        if config.estimator == "full_es":
            problem = problem._replace(length=length)
            moved, losses = _unroll_whole(config, family, data, twins, problem, keys[2])
        else:
            moved, losses = unroll(config, family, data, twins, problem, keys[2])
        slope = (losses[0] - losses[1]) / (2 * config.sigma**2)
        gradient = jax.tree.map(lambda e: slope * e, total)
        steps = moved.step - problem.step
        return PESState(moved, total), Estimate(gradient, jnp.mean(losses), steps)

    state, each = jax.vmap(one)(state, numbers)
    gradient = jax.tree.map(lambda g: jnp.sum(g, 0), each.gradient)
    return state, each._replace(gradient=gradient)


def with_equal_twins(problem: Problem) -> Problem:
    """The problem with both twins where the first one is.

    Truncated ES knows a truncation's perturbation only: what earlier ones did to the difference of
    the twins would be noise to it.
    """
    params, optimizer = jax.tree.map(
        lambda x: jnp.stack([x[0], x[0]]), (problem.params, problem.optimizer)
    )
    return problem._replace(params=params, optimizer=optimizer)


def perturb(config: MetaConfig, weights, key: Array):
    """Independent normal noise for every weight."""
    leaves, treedef = jax.tree.flatten(weights)
    keys = jax.random.split(key, len(leaves))
    noise = [
        config.sigma * jax.random.normal(k, w.shape) for k, w in zip(keys, leaves, strict=True)
    ]
    return treedef.unflatten(noise)


def _unroll_whole(config, family, data, twins, problem, key):
    """An unroll from start to end with one perturbation, truncation by truncation."""

    def more(i, carry):
        problem, total = carry
        problem, losses = unroll(config, family, data, twins, problem, jax.random.fold_in(key, i))
        return problem, total + losses

    truncations = problem.length // config.truncation
    problem, total = lax.fori_loop(0, truncations, more, (problem, jnp.zeros(2)))
    return problem, total / truncations
