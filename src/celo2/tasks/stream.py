"""Batches from the host, for data that a device cannot hold."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

Split = Literal["train", "valid"]


class Part(NamedTuple):
    """The rows of every batch that one process reads: part `index` of `count` equal ones."""

    index: int = 0
    count: int = 1


class Stream(NamedTuple):
    """What a task has as its `data` when its batches are read while it trains.

    `batches(split, seed, first, part)` yields this process's rows of batch number `first`, the
    next and so on, without end. The same arguments give the same batches, whatever was read
    before: a run resumes at its step, and any number of processes see the same batches together.
    The task's `sample` returns its first argument, which is then the batch.
    """

    batches: Callable[[Split, int, int, Part], Iterator[Any]]
    example: Any  # jax.ShapeDtypeStruct of a whole batch
    checksum: str  # SHA-256 of the data


def rows_of_part(batch: int, first: int, part: Part) -> int:
    """How many rows of each batch a process reads; a ValueError where that cannot be."""
    if first < 0:
        raise ValueError(f"first={first} is not the number of a batch: they begin with 0.")
    if not 0 <= part.index < part.count:
        raise ValueError(f"There is no part {part.index} of {part.count}: they begin with 0.")
    if batch % part.count:
        raise ValueError(
            f"A batch of {batch} rows does not divide into {part.count} equal parts: take a "
            "multiple of the number of processes."
        )
    return batch // part.count


def closing(batches: Any) -> Iterator[Any]:
    """The batches of a grain iterator, whose threads end when this one does."""
    try:
        yield from batches
    finally:
        batches.close()
