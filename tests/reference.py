"""A slow, literal Celo2 in numpy float64, for one tensor already viewed as (batch…, in, out).

It is what the JAX and Torch updates are held to, so it shares no code with either and has no
speed tricks: every feature column is built, normalised and stacked before the MLP sees it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from celo2.rule import RuleConfig
from reference_parts import (
    NS_COEFFICIENTS,
    Weights,
    matrix_axes,
    mlp,
    newton_schulz,
    normalize_column,
    rsqrt,
)

MAGNITUDE_SCALE = 0.001  # λ of the forms with a magnitude
CLIP_THRESHOLD = 1.0  # τ of the norms that clip


@dataclass(frozen=True)
class Moments:
    """The statistics of one tensor.

    A vector keeps its unfactored moments in `rows`, and its `cols` is empty.
    `running_rms` and `moved` have an entry per slice of the batch: `moved` counts the steps on
    which the slice had an update, the ones that `running_rms` is the mean over. `seen` says
    whether a slice (published: the tensor) ever had a non-zero gradient.
    """

    count: int
    momentum: list[np.ndarray]
    rms: np.ndarray
    rows: list[np.ndarray]
    cols: list[np.ndarray]
    running_rms: np.ndarray
    moved: np.ndarray
    seen: np.ndarray


def factored_axes(shape: tuple[int, ...], published: bool) -> tuple[int, int]:
    """(d1, d0): the second largest axis and the largest; on a tie the later one is d0."""
    first = 0 if published else len(shape) - 2
    order = first + np.argsort(shape[first:], kind="stable")
    return int(order[-2]), int(order[-1])


def init(config: RuleConfig, shape: tuple[int, ...], published: bool = False) -> Moments:
    """All statistics at zero."""
    if len(shape) < 2:
        rows = [np.zeros(shape) for _ in config.factored_decays]
        cols = []
    else:
        d1, d0 = factored_axes(shape, published)
        rows = [np.zeros(np.delete(shape, d0)) for _ in config.factored_decays]
        cols = [np.zeros(np.delete(shape, d1)) for _ in config.factored_decays]
    batch = shape[:-2]
    return Moments(
        count=0,
        momentum=[np.zeros(shape) for _ in config.momentum_decays],
        rms=np.zeros(shape),
        rows=rows,
        cols=cols,
        running_rms=np.zeros(batch),
        moved=np.zeros(batch, int),
        seen=np.zeros(() if published else batch, bool),
    )


def step(
    config: RuleConfig,
    weights: Weights,
    param: np.ndarray,
    grad: np.ndarray,
    moments: Moments,
    published: bool = False,
    hold: bool = True,
    skip_nonfinite: bool = True,
    coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
) -> tuple[np.ndarray, Moments]:
    """One tensor's update, before learning rate and sign, and its new statistics.

    Args:
        config: the rule's config.
        weights: the rule's arrays, w0 b0 w1 b1 …
        param: the parameter, viewed.
        grad: its gradient, viewed.
        moments: the statistics so far.
        published: factor over the two largest axes of the whole tensor, and apply the two
            policies below to the whole tensor instead of each slice.
        hold: a slice that never had a non-zero gradient does not move.
        skip_nonfinite: a slice with a non-finite gradient entry neither moves nor changes its
            statistics.
        coefficients: of Newton–Schulz.
    """
    param, grad = np.asarray(param, np.float64), np.asarray(grad, np.float64)
    judged = None if published else matrix_axes(grad)
    usable = np.isfinite(grad).all(axis=judged) if skip_nonfinite else np.array(True)
    grad = np.where(_over_slices(usable, grad), grad, 0.0)
    seen = moments.seen | (usable & (grad != 0).any(axis=judged))
    moves = usable & seen if hold else usable

    grad = np.clip(grad, -1000.0, 1000.0)
    new = _update_moments(config, grad, moments, published)
    columns = features(config, param, grad, new, published)
    inputs = np.stack([normalize_column(c) for c in columns], axis=-1)
    needed = config.gated or config.overshoot > 0
    cancelled = cancellation(config, new) if needed else np.zeros(grad.shape[:-2])
    output = mlp(weights, inputs, cancelled if config.gated else None)
    update = FORMS[config.form](output[..., 0], output[..., 1])
    if config.orthogonalize and grad.ndim >= 2:
        overshoot = _over_slices(cancelled * config.overshoot / 1.5, update)
        update = newton_schulz(update, coefficients, overshoot)

    size = _slice_rms(update)
    moved = moments.moved + 1
    running = (moments.running_rms * moments.moved + size) / moved
    update = update * _over_slices(NORMS[config.norm](size, running), update)

    return np.where(_over_slices(moves, update), update, 0.0), Moments(
        count=moments.count + 1,
        momentum=_where_usable(usable, new.momentum, moments.momentum),
        rms=_where_usable(usable, [new.rms], [moments.rms])[0],
        rows=_where_usable(usable, new.rows, moments.rows),
        cols=_where_usable(usable, new.cols, moments.cols),
        running_rms=np.where(moves, running, moments.running_rms),
        moved=np.where(moves, moved, moments.moved),
        seen=seen,
    )


def _update_moments(
    config: RuleConfig, grad: np.ndarray, moments: Moments, published: bool
) -> Moments:
    def decayed(decays, old, new):
        return [b * x + (1 - b) * new for b, x in zip(decays, old, strict=True)]

    square = grad**2 + 1e-30
    if grad.ndim < 2:
        rows, cols = decayed(config.factored_decays, moments.rows, square), []
    else:
        d1, d0 = factored_axes(grad.shape, published)
        rows = decayed(config.factored_decays, moments.rows, square.mean(axis=d0))
        cols = decayed(config.factored_decays, moments.cols, square.mean(axis=d1))
    return replace(
        moments,
        momentum=decayed(config.momentum_decays, moments.momentum, grad),
        rms=decayed([config.rms_decay], [moments.rms], grad**2)[0],
        rows=rows,
        cols=cols,
    )


def features(
    config: RuleConfig, param: np.ndarray, grad: np.ndarray, moments: Moments, published: bool
) -> list[np.ndarray]:
    """The columns of the MLP's input before normalisation: 30 for a matrix, 15 for a vector."""
    shape = grad.shape
    inverse_rms = rsqrt(moments.rms + 1e-8)
    if grad.ndim < 2:
        rows = cols = []
        factors = [rsqrt(np.maximum(u + 1e-9, 1e-9)) for u in moments.rows]
    else:
        d1, d0 = factored_axes(shape, published)
        rows = [np.expand_dims(row, d0) for row in moments.rows]
        cols = [np.expand_dims(col, d1) for col in moments.cols]
        factors = [
            rsqrt(np.maximum(row / (row.mean(axis=d1, keepdims=True) + 1e-9), 1e-9))
            * rsqrt(np.maximum(col, 1e-9))
            for row, col in zip(rows, cols, strict=True)
        ]
    columns = [
        grad,
        np.clip(grad, -0.1, 0.1),
        param,
        *moments.momentum,
        moments.rms,
        *[m * inverse_rms for m in moments.momentum],
        inverse_rms,
        *[grad * factor for factor in factors],
        grad * inverse_rms,
    ]
    if grad.ndim >= 2:
        columns += [np.broadcast_to(row, shape) for row in rows]
        columns += [np.broadcast_to(col, shape) for col in cols]
        columns += [np.broadcast_to(rsqrt(row + 1e-8), shape) for row in rows]
        columns += [np.broadcast_to(rsqrt(col + 1e-8), shape) for col in cols]
        columns += [m * f for m, f in zip(moments.momentum, factors, strict=True)]
    return columns


def cancellation(config: RuleConfig, moments: Moments) -> np.ndarray:
    """0 where gradients of successive steps are independent, 1 to 1.5 where they cancel out."""
    momentum, decay = moments.momentum[0], config.momentum_decays[0]
    size = (momentum**2).mean(axis=matrix_axes(momentum))
    rows = moments.rows[0].reshape(*momentum.shape[:-2], -1).mean(-1)
    measured = -np.log(size / (rows + 1e-30) + 1e-9)
    independent = np.log((1 + decay) / (1 - decay))
    return np.clip((measured / independent - 1) / 0.3, 0.0, 1.5)


def _exp_mean_magnitude(d: np.ndarray, m: np.ndarray) -> np.ndarray:
    return d * np.exp(MAGNITUDE_SCALE * m.mean(axis=matrix_axes(m), keepdims=True))


FORMS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "d": lambda d, m: d,
    "d_exp_m": lambda d, m: d * np.exp(MAGNITUDE_SCALE * m),
    "d_exp_m_avg": _exp_mean_magnitude,
}

# What multiplies a slice, given its root mean square and the mean of that so far.
NORMS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "raw": lambda size, running: np.ones_like(size),
    "norm": lambda size, running: 1 / size,
    "norm_clip": lambda size, running: np.minimum(1.0, CLIP_THRESHOLD / size),
    "rolling_norm": lambda size, running: 1 / running,
    "rolling_norm_clip": lambda size, running: np.minimum(1.0, CLIP_THRESHOLD * running / size),
}


def _slice_rms(x: np.ndarray) -> np.ndarray:
    return np.sqrt((x**2).mean(axis=matrix_axes(x)) + 1e-9)


def _over_slices(per_slice: np.ndarray, x: np.ndarray) -> np.ndarray:
    """One value per slice, shaped to broadcast over the slices of `x`."""
    return per_slice.reshape(per_slice.shape + (1,) * (x.ndim - per_slice.ndim))


def _where_usable(
    usable: np.ndarray, new: list[np.ndarray], old: list[np.ndarray]
) -> list[np.ndarray]:
    return [np.where(_over_slices(usable, x), x, y) for x, y in zip(new, old, strict=True)]
