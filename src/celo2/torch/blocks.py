"""Large tensors in blocks that fit a cache, and sums over tensors of which a process has a part."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from celo2.routing import MATRIX

BLOCK = 2**16  # elements
Block = tuple[slice, ...]
Fuse = Callable[[Callable], Callable]


def as_it_is(function: Callable) -> Callable:
    """What `fuse` is where nothing is compiled."""
    return function


def blocks(shape: tuple[int, ...], limit: int = BLOCK, *, whole: bool = False) -> Iterator[Block]:
    """Slices of the leading axes that cut a tensor of this shape into blocks in memory order.

    One block, the whole, where it is small or a compiler makes loops of its own.
    """
    if whole or torch.compiler.is_compiling() or math.prod(shape) <= limit:
        yield ()
        return
    inner = math.prod(shape[1:])
    step = max(1, limit // inner)
    for start in range(0, shape[0], step):
        rest = blocks(shape[1:], limit) if step == 1 else ((),)
        for block in rest:
            yield (slice(start, start + step), *block)


def part(x: Tensor, block: Block, *, stacked: bool = False) -> Tensor:
    """The block of `x`, which may have length 1 along axes that it was reduced over.

    `stacked` arrays have one axis more in front.
    """
    if not block:
        return x
    shape = x.shape[1:] if stacked else x.shape
    index = [slice(None) if n == 1 else cut for n, cut in zip(shape, block, strict=False)]
    return x[(slice(None), *index) if stacked else tuple(index)]


class Extent(NamedTuple):
    """How large a viewed tensor is as a whole, and who has the rest of it."""

    shape: tuple[int, ...]
    shards: "Shards | None" = None

    def total(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """The sums of all processes that share the tensor, from each one's own over `axes`."""
        return x if self.shards is None else self.shards.reduce(x, axes, "sum")

    def mean(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """The mean over `axes` from this process's sums."""
        size = 1
        for axis in axes:  # in a form that torch.compile can follow
            size *= self.shape[axis]
        return self.total(x, axes) / size

    def largest(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """The largest of all processes' values, infinite if one of them is NaN."""
        return x if self.shards is None else self.shards.reduce(x, axes, "max")

    def gathered(self, x: Tensor) -> Tensor:
        """Whole matrices from this process's part."""
        return x if self.shards is None else self.shards.gather(x, self.shape)

    def own(self, x: Tensor) -> Tensor:
        """This process's part of whole matrices."""
        return x if self.shards is None else self.shards.own(x, self.shape)


class Split(NamedTuple):
    """How one dimension of a device mesh splits a viewed tensor."""

    axis: int | None  # counted from the end; None: its processes have the same
    strides: int = 0  # how a tensor that another dimension splits first is cut; 0: in one piece


class Shards:
    """A viewed tensor whose axes are split over the processes of a device mesh."""

    def __init__(self, mesh, splits: list[Split]):
        """`splits` has one for each dimension of the mesh."""
        self.mesh, self.splits = mesh, splits

    def placements(self, ndim: int, reduced: tuple[int, ...] = ()) -> list:
        """How an array of this rank lies on the mesh, if it is split where the tensor is."""
        from torch.distributed.tensor import Replicate, Shard

        placements = []
        for axis, strides in self.splits:
            if axis is None or axis in reduced:
                placements.append(Replicate())
            elif strides:
                # Private, but what fully_shard makes of a tensor that is already split.
                from torch.distributed.tensor.placement_types import _StridedShard

                placements.append(_StridedShard(axis + ndim, split_factor=strides))
            else:
                placements.append(Shard(axis + ndim))
        return placements

    def reduce(self, x: Tensor, axes: tuple[int, ...], operation: str) -> Tensor:
        import torch.distributed as dist

        operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
        for dim, split in enumerate(self.splits):
            if split.axis in axes:
                # NaN has no place in an order: it goes as an infinity.
                x = x.nan_to_num(nan=math.inf, posinf=math.inf) if operation == "max" else x
                x = x.contiguous()
                dist.all_reduce(x, operations[operation], self.mesh.get_group(dim))
        return x

    def gather(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Whole matrices; a batch of them stays split, and then nothing is sent."""
        whole = self.placements(x.ndim, MATRIX)
        return self.as_dtensor(x, shape).redistribute(placements=whole).to_local()

    def own(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The inverse of `gather`."""
        whole = self.as_dtensor(x, shape, MATRIX)
        return whole.redistribute(placements=self.placements(x.ndim)).to_local()

    def as_dtensor(self, x: Tensor, shape: tuple[int, ...], reduced: tuple[int, ...] = ()):
        """This process's part as a DTensor of the whole `shape`."""
        from torch.distributed.tensor import DTensor

        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        placements = self.placements(len(shape), reduced)
        x = x.contiguous()
        return DTensor.from_local(
            x, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
