"""Small rules and problems shared by the JAX tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from small import GATED, SMALL, SMALL_BASE, make_rule

__all__ = [
    "GATED",
    "SMALL",
    "SMALL_BASE",
    "jit",
    "make_rule",
    "normal_tree",
    "state_bytes",
    "train",
]


def jit(function, **options):
    """`jax.jit` with little optimization: tests spend their time compiling, not running."""
    return jax.jit(function, compiler_options=_quick_options(), **options)


@functools.cache
def _quick_options() -> dict | None:
    options = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except Exception:  # another XLA has other options, and no error type of its own for them
        return None
    return options


def normal_tree(shapes, seed: int = 0, scale: float = 1.0, dtype=jnp.float32):
    """A tree of normal arrays from a dict of shapes."""
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(scale * rng.normal(size=s), dtype) for k, s in shapes.items()}


def train(tx, params, grads, state=None):
    """All updates, and the last parameters and state; `grads` is a list of trees."""
    update = jit(tx.update)
    state = jit(tx.init)(params) if state is None else state
    updates = []
    for grad in grads:
        step, state = update(grad, state, params)
        params = jax.tree.map(jnp.add, params, step)
        updates.append(step)
    return updates, params, state


def state_bytes(tx, params) -> int:
    """The size of the optimizer's state, without making it."""
    leaves = jax.tree.leaves(jax.eval_shape(tx.init, params))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
