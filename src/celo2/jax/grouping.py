"""One compiled body for all tensors of a shape."""

import functools
import re
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from celo2.jax.trees import leaf_paths


class Together(NamedTuple):
    """The same function in two parts, the second for a stack of jobs at once."""

    is_worth: Callable[[int], bool]  # number of jobs -> whether to do so
    begin: Callable  # static, job -> begun
    end: Callable  # static, stack of begun -> stack of results


def for_each_shape(
    function: Callable,
    jobs: list[tuple[Hashable, Any]],
    roles: list[str],
    together: Together | None = None,
) -> list[Any]:
    """[function(static, job) for static, job in jobs], compiled once for each kind of job.

    Jobs whose arrays agree in shape, dtype and sharding run one after the other in a loop: the
    program then grows with the number of shapes instead of tensors, and only one tensor's
    temporaries are alive at a time. With `together` they may only begin so.
    """
    # Under jit with automatic axes nobody knows a sharding yet, and a loop over tensors that are
    # sharded differently would reshard whole tensors. Those of one role are sharded alike.
    by_role = jax.device_count() > 1
    kinds: dict[Hashable, list[int]] = {}
    for i, ((static, job), role) in enumerate(zip(jobs, roles, strict=True)):
        kind = (static, role if by_role else "", *map(_kind, jax.tree.leaves(job)))
        kinds.setdefault(kind, []).append(i)

    results: list[Any] = [None] * len(jobs)
    for indices in kinds.values():
        static = jobs[indices[0]][0]
        members = [jobs[i][1] for i in indices]
        if len(members) == 1:
            results[indices[0]] = function(static, members[0])
            continue
        if together is not None and together.is_worth(len(members)):
            begun = _in_a_loop(functools.partial(together.begin, static), members)
            stacked = together.end(static, begun)
            for place, i in enumerate(indices):
                pick = functools.partial(lax.index_in_dim, index=place, keepdims=False)
                results[i] = jax.tree.map(pick, stacked)
            continue
        stacked = _in_a_loop(functools.partial(function, static), members)
        for place, i in zip(_opaque_range(len(members)), indices, strict=True):
            pick = functools.partial(lax.dynamic_index_in_dim, index=place, keepdims=False)
            results[i] = jax.tree.map(pick, stacked)
    return results


def _in_a_loop(function: Callable, members: list[Any]) -> Any:
    """The results of `function` on each member, stacked."""
    if jax.default_backend() != "cpu":
        # A GPU would wait for its host at every switch.
        return lax.map(function, jax.tree.map(lambda *leaves: jnp.stack(leaves), *members))
    # A switch picks each member where it lies: stacking would take 24 bytes per parameter.
    picks = [lambda member=member: member for member in members]
    _, stacked = lax.scan(
        lambda _, i: (None, function(lax.switch(i, picks))), None, jnp.arange(len(members))
    )
    return stacked


def _opaque_range(n: int) -> tuple[Array, ...]:
    """0 … n - 1 as numbers that XLA does not know when it compiles.

    XLA compiles equal kernels once, but those that read from different constant places are not
    equal: a kernel per tensor would take most of the compile time.
    """
    places = tuple(map(jnp.uint32, range(n)))
    if jax.default_backend() != "cpu":
        return places  # a GPU would copy them one by one
    # It would see through a single round, and through a number that does not change.
    return lax.fori_loop(0, 2, lambda _, old: places, (jnp.uint32(n),) * n)


def roles_of(tree) -> list[str]:
    """Every leaf's path without its numbers, the same for "block_0/query" and "block_1/query"."""
    return [re.sub(r"\d+", "", path) for path in leaf_paths(tree)]


def _kind(x: Any) -> Hashable:
    """What decides whether two arrays can share a loop."""
    return x.shape, x.dtype, getattr(jax.typeof(x), "sharding", None)
