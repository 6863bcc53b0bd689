"""Parameters as the rule sees them: matrix views in memory order, and parts of sharded ones."""

import contextlib
import math
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from celo2.routing import Axes, MatrixView, axes_of
from celo2.torch.blocks import Extent, Shards, Split


class Frame(NamedTuple):
    """How one stored parameter is worked on."""

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
    """What this process has of a tensor."""
    return x.to_local() if is_dtensor(x) else x


def aligned(grad: Any, param: Tensor) -> Tensor:
    """A gradient split as its parameter is; tensor parallelism leaves some as sums to be made."""
    if not is_dtensor(param) or grad.placements == param.placements:
        return grad
    return grad.redistribute(placements=param.placements)


def is_dtensor(x: Tensor) -> TypeGuard[Any]:  # Any: its module is slow to import
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """Where a step is called inside autocast, its products of matrices stay in float32."""
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
    return Shards(param.device_mesh, splits)


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
