"""Parameter trees: their paths and routes, matrix views of their leaves, and what is refused."""

import jax
import jax.numpy as jnp
from jax import Array

from celo2.routing import MatrixView, Overrides, Route, check_overrides, route
from celo2.rule import RuleConfig


def leaf_paths(tree) -> list[str]:
    """The path of every leaf, such as "block_0/attention/query/kernel"."""
    return [
        jax.tree_util.keystr(_unboxed(path), simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _unboxed(path: tuple) -> tuple:
    """The path without the box that flax puts around an array: `kernel` for `kernel.value`."""
    boxed = path and path[-1] == jax.tree_util.GetAttrKey("value")
    return path[:-1] if boxed else path


def leaf_routes(
    tree,
    config: RuleConfig,
    overrides: Overrides | None = None,
    published: bool = False,
) -> list[Route]:
    """The route of every leaf, in the order of `jax.tree.leaves`."""
    return [
        route(path, leaf.shape, config, overrides, published)
        for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    ]


def to_view(x: Array, view: MatrixView) -> Array:
    """A stored tensor as (batch…, in, out)."""
    if view.order != tuple(range(x.ndim)):
        x = jnp.transpose(x, view.order)
    return x.reshape(view.shape(_inverse_permute(x.shape, view.order)))


def from_view(x: Array, view: MatrixView, stored: tuple[int, ...]) -> Array:
    """The stored form of a viewed tensor."""
    x = x.reshape(tuple(stored[axis] for axis in view.order))
    if view.order == tuple(range(len(stored))):
        return x
    return jnp.transpose(x, _inverse(view.order))


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _inverse_permute(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[axis] for axis in _inverse(order))


def check_leaves(params) -> None:
    """Raises a TypeError that names the first parameter that is not a real floating array."""
    for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not hasattr(leaf, "shape"):
            raise TypeError(f"celo2 updates arrays, but {path} is a {type(leaf).__name__}.")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"celo2 updates real floating-point parameters, but {path} is {dtype}; "
                "leave it out with optax.masked or optax.partition."
            )


def check_same_tree(tree, params, what: str = "gradients") -> None:
    """Raises a ValueError that says how gradients (or another tree) and parameters differ."""
    if jax.tree.structure(tree) != jax.tree.structure(params):
        ours, theirs = leaf_paths(tree), leaf_paths(params)
        extra = sorted(set(ours) ^ set(theirs))[:3]
        raise ValueError(
            f"{what} and parameters are different trees ({len(ours)} and {len(theirs)} leaves"
            + (f"; only one has {', '.join(extra)})." if extra else ").")
        )
    leaves = zip(leaf_paths(params), jax.tree.leaves(tree), jax.tree.leaves(params), strict=True)
    for path, leaf, param in leaves:
        if jnp.shape(leaf) != jnp.shape(param):
            raise ValueError(
                f"{path} has shape {jnp.shape(leaf)} in the {what} and {jnp.shape(param)} in the "
                "parameters."
            )


def check_overrides_match(overrides: Overrides | None, params) -> None:
    """Raises a ValueError for an override that matches no leaf of the whole tree.

    `optax.tree.map_params` makes a state for a tree without leaves, which any override fits.
    """
    if paths := leaf_paths(params):
        check_overrides(overrides, paths)
