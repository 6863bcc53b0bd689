"""A task computed in another way: in half precision, or its batch in parts."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from celo2.runs.digest import like_tree, name_arrays
from celo2.tasks import Task


def in_precision(task: Task, dtype: Any) -> Task:
    """The task with its model's arithmetic in `dtype`; parameters and gradients stay as they are.

    The tasks' own losses are float32 sums even so, and gathered parameters are cast by the task.
    """

    def cast(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def loss(params, batch):
        named = name_arrays(params)
        _check_gathered(task, named)
        half = {name: x if name in task.gathered else cast(x) for name, x in named.items()}
        value, metrics = task.loss(like_tree(params, half), jax.tree.map(cast, batch))
        return value.astype(jnp.float32), metrics

    return task._replace(loss=loss)


def accumulated(task: Task, parts: int) -> Task:
    """The task whose gradient is the mean of its batch's parts, computed one after the other.

    Only one part's activations are alive at a time. The loss must be a mean over the batch, whose
    arrays all have the examples first.
    """

    def split(batch):
        # Every parts-th example, not runs of them: examples stay on the devices they are on.
        cut = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]), batch)
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), cut)

    def mean_over(function, batch):
        """The mean of `function` over the parts, added up in the order of the parts."""
        pieces = split(batch)
        shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], pieces))
        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        def add(total, piece):
            return jax.tree.map(jnp.add, total, function(piece)), None

        total, _ = jax.lax.scan(add, start, pieces)
        return jax.tree.map(lambda x: x / parts, total)

    @jax.custom_vjp
    def loss(params, batch):
        return mean_over(lambda piece: task.loss(params, piece), batch)

    def forward(params, batch):
        gradient = jax.value_and_grad(task.loss, has_aux=True)
        return mean_over(lambda piece: gradient(params, piece), batch)

    def backward(grads, cotangents):
        # The metrics are for reading only: no gradient comes back through them.
        return jax.tree.map(lambda g: cotangents[0].astype(g.dtype) * g, grads), None

    loss.defvjp(forward, backward)
    return task._replace(loss=loss)


def _check_gathered(task: Task, params: Mapping[str, Any]) -> None:
    if unknown := [name for name in task.gathered if name not in params]:
        raise ValueError(
            f"gathered={task.gathered}: there is no parameter {unknown[0]!r}; there are "
            f"{', '.join(params)}."
        )
