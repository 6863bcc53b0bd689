"""Matrices of a stack, each worked on by one device instead of a part of it by every device.

Newton–Schulz of a matrix that is cut over devices sends it around several times at every step. A
stack of layers can rather be turned: every device gets whole matrices, works alone, and gives them
back, which sends each of them twice in all.
"""

from collections.abc import Callable

import jax
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

LEAST_BUSY = 0.25  # of the devices: below that, too many would stand by


def is_worth_spreading(count: int) -> bool:
    """Whether the mesh set by `jax.set_mesh` has automatic axes, and `count` matrices keep at
    least a quarter of its devices busy."""
    mesh = jax.sharding.get_abstract_mesh()
    automatic = all(kind == AxisType.Auto for kind in mesh.axis_types)
    return automatic and mesh.size > 1 and count >= LEAST_BUSY * mesh.size


def spread(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The function for a stack whose members it treats alike and apart from each other."""

    def spread_function(stack: Array) -> Array:
        axes = jax.sharding.get_abstract_mesh().axis_names
        # One axis of the mesh after the other, there and back: XLA knows a single exchange for
        # each, and would gather the whole stack for all at once.
        for count in range(len(axes) + 1):
            stack = _across(stack, axes[:count])
        stack = function(stack)
        for count in range(len(axes), -1, -1):
            stack = _across(stack, axes[:count])
        return stack

    return spread_function


def _across(stack: Array, axes: tuple[str, ...]) -> Array:
    """The stack with its members spread over these axes; where else it is cut is left open."""
    rest = [P.UNCONSTRAINED] * (stack.ndim - 1)
    return lax.with_sharding_constraint(stack, P(axes or None, *rest))
