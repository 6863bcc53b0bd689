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
