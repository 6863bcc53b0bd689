"""The parts of the numpy reference that keep no statistics: views, columns, MLP, Newton–Schulz."""

from collections.abc import Mapping

import numpy as np

from celo2.routing import MatrixView

Weights = Mapping[str, np.ndarray]

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5


def view(x: np.ndarray, matrix_view: MatrixView) -> np.ndarray:
    """A stored tensor as (batch…, in, out); a scalar or a vector as it is."""
    if matrix_view.is_vector:
        if matrix_view.batch:
            raise ValueError(f"{matrix_view} is a batch of vectors: give the reference one by one.")
        return x
    moved = x.transpose(matrix_view.order)
    batch = moved.shape[: len(matrix_view.batch)]
    rows = moved.shape[len(batch) : len(batch) + len(matrix_view.rows)]
    columns = moved.shape[len(batch) + len(rows) :]
    return moved.reshape(*batch, np.prod(rows, dtype=int), np.prod(columns, dtype=int))


def unview(x: np.ndarray, matrix_view: MatrixView, stored_shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `view`."""
    if matrix_view.is_vector:
        return x
    unfolded = x.reshape([stored_shape[axis] for axis in matrix_view.order])
    return unfolded.transpose(np.argsort(matrix_view.order))


def normalize_column(x: np.ndarray) -> np.ndarray:
    """`x` over its root mean square, each slice by itself."""
    return x * rsqrt((x**2).mean(axis=matrix_axes(x), keepdims=True) + 1e-9)


def mlp(weights: Weights, x: np.ndarray, gate: np.ndarray | None = None) -> np.ndarray:
    """The MLP on the last axis; a vector's 15 columns meet the first 15 rows of w0.

    With a `gate`, a number for each slice, the first layer is w0 + gate × g0.
    """
    layers = len(weights) // 2
    for i in range(layers):
        w, b = (np.asarray(weights[f"{kind}{i}"], np.float64) for kind in "wb")
        y = x @ w[: x.shape[-1]] + b
        if i == 0 and gate is not None:
            opened = x @ np.asarray(weights["g0"], np.float64)[: x.shape[-1]]
            y = y + gate.reshape(gate.shape + (1,) * (y.ndim - gate.ndim)) * opened
        x = y
        if i < layers - 1:
            x = np.maximum(x, 0.0)
    return x


def newton_schulz(
    x: np.ndarray,
    coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
    overshoot: float | np.ndarray = 0.0,
) -> np.ndarray:
    """`x` with its singular values pushed towards 1, each slice by itself.

    A part of the second iterate is subtracted from the last.
    """
    a, b, c = coefficients
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.swapaxes(-2, -1)
    x = x / (np.sqrt((x**2).sum(axis=(-2, -1), keepdims=True)) + 1e-8)
    iterates = [x]
    for _ in range(NS_STEPS):
        gram = x @ x.swapaxes(-2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
        iterates.append(x)
    x = x - overshoot * iterates[2]
    return x.swapaxes(-2, -1) if tall else x


def rsqrt(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt(x)


def matrix_axes(x: np.ndarray) -> tuple[int, ...]:
    """The last two axes; a vector's only axis; a scalar's none."""
    return tuple(range(max(0, x.ndim - 2), x.ndim))
