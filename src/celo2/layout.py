"""Which axes of a tensor are its matrix; all that the rule does by rows and columns hangs on it."""

import math
from typing import NamedTuple

MATRIX = (-2, -1)  # the axes of the matrix in a viewed tensor


class MatrixView(NamedTuple):
    """How a stored tensor is read as (batch…, in, out): three groups of its axes.

    The axes of `rows` are folded into one input axis, those of `columns` into one output axis;
    `batch` axes stay apart, each slice a matrix of its own. A scalar or a vector has no rows.

    `published` marks the layout of the authors' code, in which the factored moments run over
    the two largest axes of the whole tensor, wherever they are.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    published: bool = False

    @property
    def is_vector(self) -> bool:
        return not self.rows

    @property
    def order(self) -> tuple[int, ...]:
        """The permutation that brings the stored axes to (batch…, rows…, columns…)."""
        return (*self.batch, *self.rows, *self.columns)

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The viewed shape of a tensor stored as `stored`; a vector is one row, (1, n)."""
        fold = (math.prod(stored[a] for a in axes) for axes in (self.rows, self.columns))
        return (*(stored[a] for a in self.batch), *fold)


class Axes(NamedTuple):
    """The axes of a viewed tensor that the rule treats specially, counted from the end."""

    matrix: bool  # False for scalars and vectors, whose second moments are not factored
    rows: tuple[int, ...]  # what row moments are averaged over: the largest axis
    cols: tuple[int, ...]  # what column moments are averaged over: the second largest axis
    fate: tuple[int, ...]  # what holds still or is skipped together


def vector_view(ndim: int) -> MatrixView:
    """The view of a scalar or a vector: a single row."""
    return MatrixView((), (), tuple(range(ndim)))


def published_view(ndim: int) -> MatrixView:
    """The authors' layout: the last two axes are the matrix, the others a batch."""
    if ndim < 2:
        return vector_view(ndim)
    return MatrixView(tuple(range(ndim - 2)), (ndim - 2,), (ndim - 1,), published=True)


def default_view(ndim: int) -> MatrixView:
    """The view of a JAX kernel (…, in, out) of which nothing is known but its rank.

    Two axes are a matrix, three a batch of matrices, four or more a convolution kernel whose
    taps and input channels are folded into one input axis.
    """
    if ndim < 2:
        return vector_view(ndim)
    if ndim == 3:
        return MatrixView((0,), (1,), (2,))
    return MatrixView((), tuple(range(ndim - 1)), (ndim - 1,))


def check_view(view: MatrixView, ndim: int) -> None:
    """Raises a ValueError where a user's view does not name every axis exactly once."""
    if sorted(view.order) != list(range(ndim)):
        raise ValueError(
            f"{view} does not fit a tensor of {ndim} axes: batch, rows and columns together must "
            f"name each of 0…{ndim - 1} once."
        )


def factored_axes(shape: tuple[int, ...], published: bool = False) -> tuple[int, int]:
    """(d1, d0) of a viewed shape: its second largest and its largest axis, counted from the end.

    On a tie the later axis is d0. A matrix view looks at the matrix alone, so that a stack of
    matrices is treated as its slices are; the published layout looks at every axis.
    """
    start = 0 if published else len(shape) - 2
    by_size = sorted(range(start, len(shape)), key=lambda axis: shape[axis])
    return by_size[-2] - len(shape), by_size[-1] - len(shape)


def axes_of(view: MatrixView, shape: tuple[int, ...]) -> Axes:
    """The axes of a tensor with this view and this viewed shape."""
    if view.is_vector:
        return Axes(False, (), MATRIX, MATRIX)
    d1, d0 = factored_axes(shape, view.published)
    return Axes(True, (d0,), (d1,), tuple(range(-len(shape), 0)) if view.published else MATRIX)
