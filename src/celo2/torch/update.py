"""From features to an update: the MLP, the update form, Newton–Schulz, the output norm."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from celo2.layout import MATRIX, Axes
from celo2.rule import RuleConfig
from celo2.torch.blocks import Extent, Fuse, as_it_is, blocks, part
from celo2.torch.features import (
    Inputs,
    build_planes,
    build_stripes,
    factored_scales,
    split_first_layer,
)
from celo2.torch.moments import Moments

Weights = Mapping[str, Tensor]

EPSILON = 1e-9
MAGNITUDE_SCALE = 0.001
CLIP_RMS = 1.0
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_EPSILON = 1e-8


def tensor_update(
    config: RuleConfig,
    weights: Weights,
    axes: Axes,
    param: Tensor,
    grad: Tensor,
    finite: Tensor,
    moments: Moments,
    extent: Extent,
    newton_schulz_dtype: torch.dtype | None = None,
    fuse: Fuse = as_it_is,
) -> tuple[Tensor, Tensor, Tensor]:
    """One viewed tensor's update, what scales it, and the new `running_rms`.

    These are steps 4 to 7 of Algorithm 1.
    """
    factors = factored_scales(axes, moments, extent)
    inputs = Inputs(param, grad, finite, moments.rms, moments.momentum, factors)
    kernel, offsets = normalize_inputs(config, weights, axes, inputs, moments, extent, fuse)
    channels = 1 if config.form == "d" else 2
    outputs = grad.new_empty((channels, *grad.shape), dtype=torch.float32)
    for block in blocks(grad.shape, whole=fuse is not as_it_is):
        kernel_part, *offset_parts = (part(x, block, stacked=True) for x in (kernel, *offsets))
        result = fuse(apply_mlp)(
            weights, kernel_part, offset_parts, inputs.cut(block), axes.matrix, channels
        )
        for output, plane in zip(outputs, result, strict=True):
            part(output, block).copy_(plane)
    update = FORMS[config.form](*outputs, extent)
    if config.orthogonalize and axes.matrix:
        update = extent.own(newton_schulz(extent.gathered(update), dtype=newton_schulz_dtype))
    return update, *NORMS[config.norm](rms(update, extent), moments)


def normalize_inputs(
    config: RuleConfig,
    weights: Weights,
    axes: Axes,
    inputs: Inputs,
    moments: Moments,
    extent: Extent,
    fuse: Fuse,
) -> tuple[Tensor, list[Tensor]]:
    """The first layer with each column's normaliser multiplied in.

    A kernel for the planes, (columns · hidden units, batch…, 1, 1), and what is added to their
    product, (hidden units, …): row features with the bias, and column features.
    """
    grad = inputs.grad
    parts = split_first_layer(config, weights["w0"], axes.matrix)
    squares = grad.new_zeros((len(parts[0]), *grad.shape[:-2], 1, 1), dtype=torch.float32)
    for block in blocks(grad.shape, whole=fuse is not as_it_is):
        found = fuse(sums_of_squares)(inputs.cut(block), axes.matrix)
        part(squares, block, stacked=True).add_(found)
    kernel = _normalized(parts[0], extent.mean(squares, MATRIX)).flatten(0, 1)
    bias = weights["b0"].view(-1, *[1] * grad.ndim)
    if not axes.matrix:
        return kernel, [bias]
    offsets = {}
    both = (axes.rows, axes.cols)
    for layer, stripes, reduced in zip(parts[1:], build_stripes(moments), both, strict=True):
        kept = tuple(a for a in MATRIX if a not in reduced)
        squares = extent.mean(stripes.square().sum(MATRIX, keepdim=True), kept)
        offsets[reduced] = (_normalized(layer, squares) * stripes[:, None]).sum(0)
    first, second = (offsets[reduced] for reduced in sorted(offsets))
    return kernel, [first + bias, second]


def sums_of_squares(inputs: Inputs, matrix: bool) -> Tensor:
    """Of every plane, (columns, batch…, 1, 1)."""
    planes = build_planes(inputs, matrix)
    if torch.compiler.is_compiling() or planes[0].ndim > 2:
        return torch.stack([plane.square().sum(MATRIX, keepdim=True) for plane in planes])
    dots = [torch.dot(plane.flatten(), plane.flatten()) for plane in planes]
    return torch.stack(dots)[:, None, None]


def _normalized(layer: Tensor, mean_square: Tensor) -> Tensor:
    """(columns, hidden units, batch…, 1, 1)."""
    layer = layer.view(*layer.shape, *[1] * (mean_square.ndim - 1))
    return layer * (mean_square + EPSILON).rsqrt()[:, None]


def apply_mlp(
    weights: Weights,
    kernel: Tensor,
    offsets: list[Tensor],
    inputs: Inputs,
    matrix: bool,
    channels: int,
) -> Sequence[Tensor]:
    """The MLP's first `channels` outputs: direction, then magnitude.

    A compiler gets every hidden unit as a plane of its own and makes one loop of them all;
    without one, a layer is a product of matrices.
    """
    planes = build_planes(inputs, matrix)
    layers = [(weights[f"w{i}"], weights[f"b{i}"]) for i in range(1, len(weights) // 2)]
    layers[-1] = layers[-1][0][:, :channels], layers[-1][1][:channels]
    run = _unit_by_unit if torch.compiler.is_compiling() else _by_products
    return run(planes, kernel.unflatten(0, (len(planes), -1)), offsets, layers)


def _unit_by_unit(planes, kernel, offsets, layers) -> list[Tensor]:
    units = []
    for h, column in enumerate(kernel.unbind(1)):
        unit: Any = sum(offset[h] for offset in offsets)
        for weight, plane in zip(column.unbind(0), planes, strict=True):
            unit = torch.addcmul(unit, weight, plane)
        units.append(unit)
    for layer, bias in layers:
        inputs = [unit.relu() for unit in units]
        units = []
        for column, unit in zip(layer.unbind(1), bias.unbind(0), strict=True):
            for weight, plane in zip(column.unbind(0), inputs, strict=True):
                unit = torch.addcmul(unit, weight, plane)
            units.append(unit)
    return units


def _by_products(planes, kernel, offsets, layers) -> tuple[Tensor, ...]:
    matrix = planes[0].shape[-2:]
    kernel = kernel.flatten(-2).squeeze(-1).movedim((1, 0), (-2, -1))  # (batch…, units, columns)
    units = kernel @ torch.stack(planes, dim=-3).flatten(-2)
    units = units.unflatten(-1, matrix)  # (batch…, units, ·, ·)
    for offset in offsets:
        units += offset.movedim(0, -3)
    for layer, bias in layers:
        units = (layer.mT @ units.relu_().flatten(-2)).add_(bias[:, None])
        units = units.unflatten(-1, matrix)
    return units.unbind(-3)


# Each takes the direction, the magnitude if it needs one, and the tensor's extent.
FORMS: dict[str, Callable[..., Tensor]] = {
    "d": lambda d, extent: d,
    "d_exp_m": lambda d, m, extent: d * torch.exp(MAGNITUDE_SCALE * m),
    "d_exp_m_avg": lambda d, m, extent: (
        d * torch.exp(MAGNITUDE_SCALE * extent.mean(m.sum(MATRIX, keepdim=True), MATRIX))
    ),
}


def newton_schulz(
    x: Tensor, steps: int = NEWTON_SCHULZ_STEPS, dtype: torch.dtype | None = None
) -> Tensor:
    """Pushes the singular values of `x` towards 1, over its last two axes.

    Five steps leave most of them in [0.7, 1.2], and very small ones below: that is enough
    (Algorithm 1, step 6).
    """
    # Transposed where rows > columns: the Gram matrix is then the smaller one.
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT, steps, dtype).mT
    norm = torch.linalg.vector_norm(x, dim=MATRIX, keepdim=True)
    y = (x / (norm + NEWTON_SCHULZ_EPSILON)).to(dtype or x.dtype)
    y = y.reshape(-1, *y.shape[-2:])
    if y.shape[-1] >= 2 * y.shape[-2]:
        y = _gram_polynomial(y @ y.mT, steps) @ y
    else:
        a, b, c = NEWTON_SCHULZ
        for _ in range(steps):
            gram = y @ y.mT
            factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            y = torch.baddbmm(y, factor, y, beta=a)
    return y.view(x.shape).to(x.dtype)


def _gram_polynomial(gram: Tensor, steps: int) -> Tensor:
    """The matrix that takes y to its last Newton–Schulz iterate, from gram = y yᵀ.

    The iterates are polynomials in the Gram matrix times y. For a wide y it is cheaper to
    multiply the small matrices and touch y only once more.
    """
    a, b, c = NEWTON_SCHULZ

    def factor_of(gram: Tensor) -> Tensor:
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        return factor

    total = factor = factor_of(gram)
    for _ in range(steps - 1):
        gram = factor @ gram @ factor
        factor = factor_of(gram)
        total = factor @ total
    return total


def rms(update: Tensor, extent: Extent) -> Tensor:
    """The root mean square of each slice."""
    norm = torch.linalg.vector_norm(update, dim=MATRIX, keepdim=True)
    return (extent.mean(norm.square(), MATRIX) + EPSILON).sqrt()


def _mean_rms(size: Tensor, moments: Moments) -> Tensor:
    """The mean RMS of all updates so far, this one included."""
    return moments.running_rms + (size - moments.running_rms) / moments.moves.clamp(min=1)


def _rolling_norm(size: Tensor, moments: Moments) -> tuple[Tensor, Tensor]:
    mean = _mean_rms(size, moments)
    return 1 / mean, mean


def _rolling_norm_clip(size: Tensor, moments: Moments) -> tuple[Tensor, Tensor]:
    mean = _mean_rms(size, moments)
    return (CLIP_RMS * mean / size).clamp(max=1.0), mean


# Each takes the update's RMS and the moments, and returns what scales the update and the new
# `running_rms`, which all but the rolling norms leave as it is.
NORMS: dict[str, Callable[[Tensor, Moments], tuple[Tensor, Tensor]]] = {
    "raw": lambda size, moments: (torch.ones_like(size), moments.running_rms),
    "norm": lambda size, moments: (1 / size, moments.running_rms),
    "norm_clip": lambda size, moments: ((CLIP_RMS / size).clamp(max=1.0), moments.running_rms),
    "rolling_norm": _rolling_norm,
    "rolling_norm_clip": _rolling_norm_clip,
}
