"""Parameters as the rule uses them: matrix views, parts of sharded ones, stacks of equal ones."""

# pyright: reportPrivateImportUsage=false
# Torch has no public names for its foreach operations.

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from celo2.routing import MATRIX, Axes, MatrixView, axes_of

# Bytes. A step is taken when activations are gone, so an accelerator has memory to spare; on a CPU
# the blocks should stay in a core's cache, and take no more than the largest tensor does.
ACCELERATOR_WORKSPACE = 2**30
CPU_WORKSPACE = 2**20, 2**22
FLOAT = 4  # bytes

Block = tuple[slice, ...]
Fuse = Callable[[Callable], Callable]


class Extent(NamedTuple):
    """The whole shape of a viewed tensor, and how it is sharded over processes, if it is."""

    shape: tuple[int, ...]
    shards: "Shards | None" = None

    def mean(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        """The mean over `axes` of the whole tensor, from this process's sums over them."""
        size = 1
        for axis in axes:  # in a form that torch.compile can follow
            size *= self.shape[axis]
        total = x if self.shards is None else self.shards.reduce(x, axes, "sum")
        return total / size

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

    axis: int | None  # counted from the end; None is replicated
    strides: int = 0  # split factor where another dimension splits the axis too; 0 without


class Shards(NamedTuple):
    """A viewed tensor whose axes are split over the processes of a device mesh."""

    mesh: Any
    splits: tuple[Split, ...]  # one for each dimension of the mesh

    def placements(self, ndim: int, reduced: tuple[int, ...] = ()) -> list:
        """The placements of an array of this rank that is split where the tensor is."""
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
                # NaN has no order: it is sent as an infinity.
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


class Frame(NamedTuple):
    """How a stored parameter is viewed: its matrix, the axes of its moments, its extent."""

    view: MatrixView  # with rows and columns in the order in which memory has them
    axes: Axes
    extent: Extent


def frame_of(param: Tensor, view: MatrixView) -> Frame:
    """The frame of a parameter whose matrix is `view`.

    A Linear weight is stored (out, in), its matrix is (in, out). All that the rule computes is
    the same on the transposed matrix, once it is settled which axis is the largest.
    """
    shape = tuple(param.shape)
    axes = axes_of(view, view.shape(shape))
    if view.rows and view.columns and view.columns[0] < view.rows[0]:
        view = view._replace(rows=view.columns, columns=view.rows)
        rows, cols = (
            tuple({-1: -2, -2: -1}.get(a, a) for a in over) for over in (axes.rows, axes.cols)
        )
        axes = axes._replace(rows=rows, cols=cols)
    if view.is_vector:
        view = _single_row(view, shape)
    return Frame(view, axes, Extent(view.shape(shape), _shards_of(param, view)))


def _single_row(view: MatrixView, shape: tuple[int, ...]) -> MatrixView:
    """A vector's view with its axes of length 1 as the row, where a shard of one can be empty."""
    rows = tuple(axis for axis in view.columns if shape[axis] == 1)
    return view._replace(rows=rows, columns=tuple(a for a in view.columns if a not in rows))


def local(x: Any) -> Tensor:
    """This process's part of a tensor."""
    return x.to_local() if is_dtensor(x) else x


def aligned(grad: Any, param: Tensor) -> Tensor:
    """A gradient placed as its parameter; tensor parallelism leaves some as partial sums."""
    if not is_dtensor(param) or grad.placements == param.placements:
        return grad
    return grad.redistribute(placements=param.placements)


def is_dtensor(x: Tensor) -> TypeGuard[Any]:  # Any: its module is slow to import
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """A context that disables autocast, so that products of matrices stay in float32."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def to_view(x: Tensor, view: MatrixView) -> Tensor:
    """A stored tensor as (batch…, ·, ·): memory shared where its strides allow it."""
    if _is_stored(view):
        return x
    return x.permute(view.order).reshape(view.shape(tuple(x.shape)))


def from_view(x: Tensor, view: MatrixView, stored: torch.Size) -> Tensor:
    """The stored form of a viewed tensor."""
    if _is_stored(view):
        return x
    x = x.reshape([stored[axis] for axis in view.order])
    return x.permute(sorted(range(len(stored)), key=view.order.__getitem__))


def is_view(x: Tensor, view: MatrixView) -> bool:
    """Whether `to_view` shares the memory of `x`, which has the folded axes in a row."""
    for folded in (view.rows, view.columns):
        axes = [axis for axis in folded if x.shape[axis] != 1]
        for axis, behind in zip(axes, axes[1:], strict=False):
            if x.stride(axis) != x.stride(behind) * x.shape[behind]:
                return x.numel() == 0
    return True


def _is_stored(view: MatrixView) -> bool:
    """Whether the view has the stored axes as they are."""
    single = len(view.rows) == len(view.columns) == 1
    return single and view.order == tuple(range(len(view.order)))


def _shards_of(param: Any, view: MatrixView) -> Shards | None:
    """Which axis of the viewed tensor each dimension of the device mesh splits."""
    if not is_dtensor(param):
        return None
    splits, parts = [], [1] * param.ndim
    for placement, processes in zip(param.placements, param.device_mesh.shape, strict=True):
        if placement.is_replicate():
            splits.append(Split(None))
            continue
        if not hasattr(placement, "dim"):
            raise ValueError(
                f"celo2 works on DTensors placed as Shard or Replicate, not {placement}."
            )
        place = _viewed_axis(placement.dim, view, tuple(param.shape))
        splits.append(Split(place, getattr(placement, "split_factor", 0)))
        parts[placement.dim] *= processes
    for folded in (view.rows, view.columns):
        for i, axis in enumerate(folded):
            behind = math.prod(param.shape[a] for a in folded[i + 1 :])
            if behind > 1 and param.shape[axis] % parts[axis]:
                raise ValueError(
                    f"celo2 cannot fold axes {folded} of a tensor of shape {tuple(param.shape)} "
                    f"whose axis {axis} is split unevenly over {parts[axis]} processes; shard it "
                    "along another axis, or pad it."
                )
    return Shards(param.device_mesh, tuple(splits))


def _viewed_axis(axis: int, view: MatrixView, shape: tuple[int, ...]) -> int:
    """Where a stored axis is in the view, counted from the end."""
    if axis in view.batch:
        return view.batch.index(axis) - len(view.batch) - 2
    for folded, place in ((view.rows, -2), (view.columns, -1)):
        if axis in folded and all(shape[a] == 1 for a in folded[: folded.index(axis)]):
            return place
    raise ValueError(
        f"celo2 cannot follow a tensor sharded along axis {axis}, which is folded behind another "
        f"one in its matrix view {view}; shard it along axis 0."
    )


def default_workspace(largest: Tensor) -> int:
    """The bytes that the temporaries of a step may take beside its largest tensor."""
    if largest.device.type != "cpu":
        return ACCELERATOR_WORKSPACE
    least, most = CPU_WORKSPACE
    # A sixteenth is for what is not counted: rows, columns and the MLP's offsets.
    return min(max(least, FLOAT * largest.numel() * 15 // 16), most)


def as_it_is(function: Callable) -> Callable:
    """The identity, which `Plan.fuse` is where nothing is compiled."""
    return function


class Stack:
    """Equal tensors as one array (members, batch…, ·, ·) that is only ever made in blocks."""

    def __init__(self, members: Sequence[Tensor]):
        self.members = members
        self.shape = (len(members), *members[0].shape)

    def cut(self, block: Block) -> list[Tensor]:
        """The block's part of each member that it covers."""
        members = self.members[block[0]] if block else self.members
        return [part(member, block[1:]) for member in members]


def take(stacks: Sequence[Stack], block: Block) -> list[Tensor]:
    """A block of each stack, as a view of a single member or as a copy of several."""
    cuts = [stack.cut(block) for stack in stacks]
    if len(cuts[0]) == 1:
        return [cut[0].unsqueeze(0) for cut in cuts]
    return list(torch.stack(sum(cuts, [])).unflatten(0, (len(cuts), -1)).unbind(0))


def put(stacks: Sequence[Stack], block: Block, values: Sequence[Tensor]) -> None:
    """Writes changed blocks back; that of a single member is a view, changed in place."""
    if len(values[0]) > 1:
        own = [x for value in values for x in value.unbind(0)]
        torch._foreach_copy_(sum((stack.cut(block) for stack in stacks), []), own)


class Plan(NamedTuple):
    """How a stack is stepped; only the two policies and the dtype change results."""

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
    """A reduction of a stack that is accumulated block by block."""

    def __init__(self, combine: Callable[..., Tensor] = torch.add):
        self.combine = combine
        self.total: Any = None

    def add(self, block: Block, found: Tensor, shape: Sequence[int], stacked: int = 0) -> None:
        """Adds the reduction of a block; `shape` is that of the total."""
        if not block:
            self.total = found
            return
        if self.total is None:
            self.total = found.new_zeros(tuple(shape))
        own = part(self.total, block, stacked=stacked)
        self.combine(own, found, out=own)


def part(x: Tensor, block: Block, *, stacked: int = 0) -> Tensor:
    """The block of `x`, which may have length 1 along axes that it was reduced over.

    `stacked` is how many axes more it has in front.
    """
    for axis, cut in enumerate(block, start=stacked):
        if x.shape[axis] != 1:
            x = x.narrow(axis, cut.start, cut.stop - cut.start)
    return x
