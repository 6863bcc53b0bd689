"""A table of who updates what, and why."""

import math
from pathlib import Path

import jax

from celo2.jax.alias import Mask, route_all
from celo2.jax.trees import check_leaves, check_overrides_match, leaf_paths
from celo2.routing import Explanation, Line, Overrides
from celo2.rule import Rule
from celo2.rulefile import as_rule


def explain(
    params,
    *,
    rule: Rule | str | Path = "celo2",
    adam_mask: Mask | None = None,
    overrides: Overrides | None = None,
    published: bool = False,
) -> Explanation:
    """A printable table of who updates each tensor under `celo2` with the same arguments.

    Args:
        params: the parameters, or their shapes as `jax.eval_shape` gives them.
        rule, adam_mask, overrides, published: as for `celo2`.

    Example:
        >>> import jax.numpy as jnp
        >>> from celo2.jax import explain
        >>> table = explain({"embed": jnp.ones((9, 4)), "mlp": jnp.ones((4, 8))})
        >>> [(line.path, line.updater) for line in table]
        [('embed', 'adam'), ('mlp', 'rule')]
    """
    check_leaves(params)
    check_overrides_match(overrides, params)
    routes = route_all(params, as_rule(rule).config, adam_mask, overrides, published)
    return Explanation(
        Line(path, leaf.shape, *route, route.view.shape(leaf.shape), math.prod(leaf.shape))
        for path, leaf, route in zip(
            leaf_paths(params), jax.tree.leaves(params), routes, strict=True
        )
    )
