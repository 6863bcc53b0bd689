"""The size of updates and parameters, measured where they meet: in the optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from celo2.jax.optimizer import route_all
from celo2.rule import CELO2

GROUPS = {"rule": "hidden", "adam": "other"}


class NormState(NamedTuple):
    """The optimizer's own state, and the root mean squares of its latest update."""

    inner: optax.OptState
    norms: dict[str, dict[str, Array]]  # update_rms and param_rms, by group


def with_norms(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`tx`, whose state also tells how large its latest update and the parameters before it are.

    Groups are the same for all optimizers: `hidden` matrices, which Celo2's rule and Muon update,
    and `other` tensors, which both leave to AdamW.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params):
        zero = jax.tree.map(lambda _: jnp.zeros(()), _norms(params, params))
        return NormState(tx.init(params), zero)

    def update(updates, state, params=None, **extra_args):
        updates, inner = tx.update(updates, state.inner, params, **extra_args)
        return updates, NormState(inner, _norms(updates, params))

    return optax.GradientTransformationExtraArgs(init, update)


def group_leaves(params: Any) -> dict[str, list[Any]]:
    """The leaves of each group; a group without any is left out."""
    groups: dict[str, list[Any]] = {}
    for route, leaf in zip(route_all(params, CELO2), jax.tree.leaves(params), strict=True):
        groups.setdefault(GROUPS[route.updater], []).append(leaf)
    return groups


def _norms(updates: Any, params: Any) -> dict[str, dict[str, Array]]:
    return {"update_rms": _rms(updates), "param_rms": _rms(params)}


def _rms(tree: Any) -> dict[str, Array]:
    return {
        group: jnp.sqrt(
            sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in leaves)
            / max(1, sum(leaf.size for leaf in leaves))
        )
        for group, leaves in group_leaves(tree).items()
    }
