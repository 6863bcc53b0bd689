"""The data of each step: arrays that stay on the devices, or batches that come from the host."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from celo2.runs.mesh import DATA
from celo2.tasks import Part, Split, Stream


class Feed:
    """What a step or a validation is given as its data.

    Batches are read ahead while the devices work. Asking for the steps in order is fast; any other
    step is found as well.
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


def place_batch(rows: Any, example: Any, mesh: Mesh | None) -> Any:
    """The batch on the devices, of which `rows` are those of this process."""
    if mesh is None:
        return jax.tree.map(jax.numpy.asarray, rows)
    sharding = NamedSharding(mesh, P(DATA))

    def place(mine: np.ndarray, whole: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, np.asarray(mine), whole.shape)

    return jax.tree.map(place, rows, example)


def place_arrays(data: Any, mesh: Mesh | None) -> Any:
    """A task's arrays on every device."""
    if mesh is None or data is None:
        return data
    return jax.device_put(jax.tree.map(np.asarray, data), NamedSharding(mesh, P()))
