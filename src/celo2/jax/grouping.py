"""One compiled body for all tensors of a shape, and whole matrices for each device of a mesh.

Neither changes the results, which are those of a plain call for each tensor.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LEAST_BUSY = 0.25  # of the devices: with fewer matrices, redistributing leaves too many idle


def for_each_group(
    function: Callable[[Any, list[Any]], list[Any]],
    jobs: list[tuple[Hashable, Any]],
    roles: list[str],
) -> list[Any]:
    """The results of all jobs; `function` is called once for each group that can share a loop.

    Args:
        function: (constant, trees) -> results, one for each tree of a group.
        jobs: a constant and a tree of arrays for each tensor; those of a group agree in the
            constant and in the arrays' shapes, dtypes and shardings.
        roles: a name for each job. On a mesh with automatic axes shardings are unknown under jit,
            and a loop over tensors that are sharded differently would reshard whole tensors; there
            a group has jobs of one role only.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, ((static, job), role) in enumerate(zip(jobs, roles, strict=True)):
        mesh = mesh_of(job)
        unknown = AxisType.Auto in mesh.axis_types and mesh.size > 1
        kind = (static, role if unknown else "", *map(_kind, jax.tree.leaves(job)))
        groups.setdefault(kind, []).append(i)
    results: list[Any] = [None] * len(jobs)
    for indices in groups.values():
        found = function(jobs[indices[0]][0], [jobs[i][1] for i in indices])
        for i, result in zip(indices, found, strict=True):
            results[i] = result
    return results


def mesh_of(job: Any) -> AbstractMesh:
    """The mesh of the first array that has one, else the one set by `jax.set_mesh`."""
    for x in jax.tree.leaves(job):
        mesh = jax.typeof(x).sharding.mesh
        if not mesh.empty:
            return mesh
    return jax.sharding.get_abstract_mesh()


def _kind(x: Array) -> Hashable:
    """What decides whether two arrays can share a loop."""
    return x.shape, x.dtype, jax.typeof(x).sharding


def for_each(function: Callable[[Any], Any], members: list[Any]) -> list[Any]:
    """[function(member) for member in members], compiled once for members of one group.

    They run one after the other in a loop: the program then grows with the number of shapes
    instead of tensors, and only one tensor's temporaries are alive at a time.
    """
    if len(members) == 1:
        return [function(members[0])]
    return lax.platform_dependent(
        loop(function, members),
        cpu=functools.partial(_unstack_by_one_kernel, n=len(members)),
        default=functools.partial(unstack, n=len(members)),
    )


def loop(function: Callable[[Any], Any], members: list[Any]) -> Any:
    """The results of `function` on each member, stacked."""
    # Only the loop for the current platform is compiled. Both are traced: jit keeps the trace.
    function = jax.jit(function)
    return lax.platform_dependent(
        members,
        cpu=functools.partial(_loop_in_place, function),
        default=functools.partial(_loop_over_stack, function),
    )


def _loop_in_place(function: Callable[[Any], Any], members: list[Any]) -> Any:
    """A switch selects each member in place: stacking would take 24 bytes per parameter."""
    picks = [lambda member=member: member for member in members]
    _, stacked = lax.scan(
        lambda _, i: (None, function(lax.switch(i, picks))), None, jnp.arange(len(members))
    )
    return stacked


def _loop_over_stack(function: Callable[[Any], Any], members: list[Any]) -> Any:
    """A GPU would wait for its host at every switch."""
    return lax.map(function, jax.tree.map(lambda *leaves: jnp.stack(leaves), *members))


def unstack(stacked: Any, n: int) -> list[Any]:
    """The members of a stack."""
    return [
        jax.tree.map(lambda x, i=i: lax.index_in_dim(x, i, keepdims=False), stacked)
        for i in range(n)
    ]


def _unstack_by_one_kernel(stacked: Any, n: int) -> list[Any]:
    """`unstack` at indices that are unknown when XLA compiles.

    XLA compiles equal kernels once, but kernels that read from different constant indices are not
    equal: a kernel per tensor would take most of the compile time.
    """
    places = tuple(map(jnp.uint32, range(n)))
    # XLA would simplify a loop with a single iteration or a carry that does not change.
    opaque = lax.fori_loop(0, 2, lambda _, old: places, (jnp.uint32(n),) * n)
    return [
        jax.tree.map(lambda x, i=i: lax.dynamic_index_in_dim(x, i, keepdims=False), stacked)
        for i in opaque
    ]


def is_worth_redistributing(mesh: AbstractMesh, count: int) -> bool:
    """Whether the mesh has automatic axes, and `count` matrices keep a quarter of it busy."""
    automatic = all(kind == AxisType.Auto for kind in mesh.axis_types)
    return automatic and min(mesh.size, count) > 1 and count >= LEAST_BUSY * mesh.size


def redistributed(
    function: Callable[..., tuple[Array, Any]], mesh: AbstractMesh
) -> Callable[..., tuple[Array, Any]]:
    """`function`, which treats the members of a stack separately, with whole members per device.

    Its other arguments and results are small; their shardings are left to XLA.

    Newton–Schulz of a matrix that is sharded over devices communicates several times in every
    iteration. Here every device gets whole matrices, works alone, and returns them, so that each
    is sent only twice.
    """

    def on_whole_members(stack: Array, *rest: Any) -> tuple[Array, Any]:
        axes = mesh.axis_names
        # One axis of the mesh after the other, there and back: each is a single exchange, while
        # all at once would make XLA gather the whole stack.
        for count in range(len(axes) + 1):
            stack = _shard_members(mesh, axes[:count], stack)
        stack, found = function(stack, *rest)
        for count in range(len(axes), -1, -1):
            stack = _shard_members(mesh, axes[:count], stack)
        return stack, found

    return on_whole_members


def _shard_members(mesh: AbstractMesh, axes: tuple[str, ...], stack: Array) -> Array:
    """The stack with its members distributed over these axes; other axes are left to XLA."""
    spec = P(axes or None, *[P.UNCONSTRAINED] * (stack.ndim - 1))
    return lax.with_sharding_constraint(stack, NamedSharding(mesh, spec))
