"""How a run's arrays are sharded over a mesh: data, batches, parameters, optimizer state.

Where a mesh may be None, that is a single device.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from celo2.jax.optimizer import leaf_paths
from celo2.runs.processes import DATA, MODEL
from celo2.tasks import Part, Split, Stream

# Layers whose outputs, or inputs, are sharded over the model axis.
BY_COLUMNS = ("q", "k", "v", "up", "lm_head")
BY_ROWS = ("o", "down", "embed")
SMALLEST = 2  # axes of a tensor that is sharded; those with fewer are replicated


class Batches:
    """The data of each step or validation batch: a task's arrays, or batches of its stream.

    Batches are read ahead while the devices work, in the order of steps; any other order works but
    is slow.
    """

    def __init__(self, data: Any, split: Split, seed: int, mesh: Mesh | None):
        self._data, self._seed, self._mesh = data, seed, mesh
        self._split: Split = split
        self._next, self._batches = -1, iter(())

    def at(self, step: int) -> Any:
        """The data of that step."""
        if not isinstance(self._data, Stream):
            return self._data
        if step != self._next:
            self._batches = self._open(step)
        self._next = step + 1
        return place_batch(next(self._batches), self._data.example, self._mesh)

    def _open(self, step: int) -> Iterator[Any]:
        assert isinstance(self._data, Stream)
        part = Part(jax.process_index(), jax.process_count())
        return self._data.batches(self._split, self._seed, step, part)


def in_mesh(mesh: Mesh | None) -> AbstractContextManager:
    """A context in which `mesh` is set, where optimizers find it."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def place_arrays(arrays: Any, mesh: Mesh | None) -> Any:
    """A task's or a rule's arrays, replicated on every device."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, arrays)
    return jax.device_put(jax.tree.map(np.asarray, arrays), NamedSharding(mesh, P()))


def place_batch(rows: Any, example: Any, mesh: Mesh | None) -> Any:
    """The batch on the devices; `rows` are this process's part of it."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, rows)
    sharding = NamedSharding(mesh, P(DATA))

    def place(mine: np.ndarray, whole: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, np.asarray(mine), whole.shape)

    return jax.tree.map(place, rows, example)


def batch_shapes(stream: Stream, mesh: Mesh | None) -> Any:
    """The shapes of a batch of the stream, with shardings if there is a mesh."""
    if mesh is None:
        return stream.example
    return on_mesh(stream.example, jax.tree.map(lambda _: P(DATA), stream.example), mesh)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """The batch with its examples, which come first, sharded over the data axis."""
    return jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(DATA))), batch
    )


def check_batch(batch: int | None, accumulate: int, mesh: Mesh) -> None:
    """Raises a ValueError unless every part of a batch divides over the data axis."""
    if batch is not None and batch % (accumulate * mesh.shape[DATA]):
        raise ValueError(
            f"batch={batch} in {accumulate} parts cannot be shared by {mesh.shape[DATA]} devices "
            f"along {DATA}: choose a multiple of {accumulate * mesh.shape[DATA]}."
        )


def parameter_specs(params: Any, mesh: Mesh) -> Any:
    """A PartitionSpec for each parameter."""
    leaves, structure = jax.tree.flatten(params)
    specs = [
        leaf_spec(path, leaf.shape, dict(mesh.shape))
        for path, leaf in zip(leaf_paths(params), leaves, strict=True)
    ]
    return structure.unflatten(specs)


def leaf_spec(path: str, shape: tuple[int, ...], sizes: dict[str, int]) -> P:
    """The PartitionSpec of one parameter, from its path and shape.

    >>> tuple(leaf_spec("block_0/mlp/up/kernel", (64, 256), {"data": 4, "model": 2}))
    ('data', 'model')
    """
    if len(shape) < SMALLEST:
        return P()
    axes: list[str | None] = [None] * len(shape)
    layer = path.split("/")[-2:][0]
    side = len(shape) - 1 if layer in BY_COLUMNS else len(shape) - 2
    if layer in BY_COLUMNS + BY_ROWS and _divides(sizes[MODEL], shape[side]):
        axes[side] = MODEL
    # The longer of the last two sides, or the columns of a square, if it is not taken yet.
    for side in sorted((len(shape) - 1, len(shape) - 2), key=lambda i: -shape[i]):
        if axes[side] is None and _divides(sizes[DATA], shape[side]):
            axes[side] = DATA
            break
    return P(*axes)


def optimizer_specs(tx: optax.GradientTransformation, params: Any, specs: Any, mesh: Mesh) -> Any:
    """PartitionSpecs of the optimizer's state for parameters of these shapes and specs.

    `init` is traced with shardings as part of the types, which works for any optimizer.
    """
    explicit = AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names)
    )

    def typed(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(explicit, spec))

    with jax.sharding.use_abstract_mesh(explicit):
        found = jax.eval_shape(tx.init, jax.tree.map(typed, params, specs))
    return jax.tree.map(lambda x: x.sharding.spec if x.sharding else P(), found)


def on_mesh(abstract: Any, specs: Any, mesh: Mesh) -> Any:
    """The shapes with shardings from these specs."""
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        abstract,
        specs,
    )


def _divides(size: int, length: int) -> bool:
    return size > 1 and length % size == 0
