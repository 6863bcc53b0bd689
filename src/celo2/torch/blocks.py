"""Equal tensors as one array, worked on in blocks whose temporaries fit a workspace."""

# pyright: reportPrivateImportUsage=false
# Torch has no public names for its foreach operations.

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from celo2.torch.tensors import Extent

# Bytes. A step is taken when activations are gone, so an accelerator has room to spare; on a CPU
# the blocks should stay in a core's cache.
ACCELERATOR_WORKSPACE, CPU_WORKSPACE = 2**30, 2**22
FLOAT = 4  # bytes

Block = tuple[slice, ...]
Fuse = Callable[[Callable], Callable]


def default_workspace(device: torch.device) -> int:
    """The bytes that the temporaries of a step may take on a device."""
    return CPU_WORKSPACE if device.type == "cpu" else ACCELERATOR_WORKSPACE


def as_it_is(function: Callable) -> Callable:
    """What `fuse` is where nothing is compiled."""
    return function


class Stack:
    """Equal tensors as one array (members, batch…, ·, ·) that is only ever made in blocks."""

    def __init__(self, members: Sequence[Tensor]):
        self.members = members
        self.shape = (len(members), *members[0].shape)

    def cut(self, block: Block) -> list[Tensor]:
        """What a block has of each member that it reaches."""
        members = self.members[block[0]] if block else self.members
        return [part(member, block[1:]) for member in members]


def take(stacks: Sequence[Stack], block: Block) -> list[Tensor]:
    """A block of each stack, as a view of a single member or as a copy of several."""
    cuts = [stack.cut(block) for stack in stacks]
    if len(cuts[0]) == 1:
        return [cut[0].unsqueeze(0) for cut in cuts]
    return list(torch.stack(sum(cuts, [])).unflatten(0, (len(cuts), -1)).unbind(0))


def put(stacks: Sequence[Stack], block: Block, values: Sequence[Tensor]) -> None:
    """Writes changed blocks back; a view of a single member was changed where it is."""
    cuts = [stack.cut(block) for stack in stacks]
    if len(cuts[0]) > 1:
        own = [x for value in values for x in value.unbind(0)]
        torch._foreach_copy_(sum(cuts, []), own)


class Plan(NamedTuple):
    """How a stack is stepped; nothing here but the policies changes a number."""

    extent: Extent  # of the stack
    workspace: int  # bytes
    skip_nonfinite: bool = True
    hold_unused: bool = True
    newton_schulz_dtype: torch.dtype | None = None
    fuse: Fuse = as_it_is  # what compiles a function of a block

    @property
    def compiles(self) -> bool:
        return self.fuse is not as_it_is or torch.compiler.is_compiling()

    def blocks(self, shape: tuple[int, ...], floats: int) -> Iterator[Block]:
        """Blocks of which each element takes so many floats of temporaries.

        A compiler gets whole members: it makes loops of its own and keeps no temporaries.
        """
        limit = self.workspace // (FLOAT * floats)
        if self.compiles:
            limit = max(limit, math.prod(shape[1:]))
        return blocks(shape, limit)


def blocks(shape: tuple[int, ...], limit: int) -> Iterator[Block]:
    """Slices of the leading axes that cut an array into blocks of at most `limit` elements."""
    if math.prod(shape) <= limit:
        yield ()
        return
    inner = math.prod(shape[1:])
    step = max(1, limit // inner)
    # As even as possible: a small rest takes as many operations as a full block.
    step = -(-shape[0] // -(-shape[0] // step))
    for start in range(0, shape[0], step):
        rest = blocks(shape[1:], limit) if inner > max(1, limit) else ((),)
        for block in rest:
            yield (slice(start, min(start + step, shape[0])), *block)


class Sums:
    """What is added up, block by block, for the slices of a stack."""

    def __init__(self, combine: Callable[..., Tensor] = torch.add):
        self.combine = combine
        self.total: Any = None

    def add(self, block: Block, found: Tensor, shape: Sequence[int], stacked: bool = False) -> None:
        """Takes in what was found in a block; `shape` is that of the total."""
        if not block:
            self.total = found
            return
        if self.total is None:
            self.total = found.new_zeros(tuple(shape))
        own = part(self.total, block, stacked=stacked)
        self.combine(own, found, out=own)


def part(x: Tensor, block: Block, *, stacked: bool = False) -> Tensor:
    """The block of `x`, which may have length 1 along axes that it was reduced over.

    `stacked` arrays have one axis more in front.
    """
    for axis, cut in enumerate(block, start=int(stacked)):
        if x.shape[axis] != 1:
            x = x.narrow(axis, cut.start, cut.stop - cut.start)
    return x
