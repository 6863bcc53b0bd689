"""From features to an update: the MLP, the update form, orthogonalization, the output norm."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from celo2.routing import MATRIX, Axes
from celo2.rule import CLIP_RMS, EPSILON, MAGNITUDE_SCALE, RuleConfig
from celo2.torch.blocks import Block, Extent, Fuse, as_it_is, blocks, part
from celo2.torch.features import (
    Inputs,
    build_planes,
    build_stripes,
    factored_scales,
    split_first_layer,
)
from celo2.torch.moments import Moments, in_order
from celo2.torch.newton_schulz import newton_schulz

Weights = Mapping[str, Tensor]


class FirstLayer(NamedTuple):
    """The MLP's first layer with each column's normaliser multiplied in."""

    factors: tuple[Tensor, ...]  # of `Inputs`, which the columns are made of
    kernel: Tensor  # for the planes, (columns · hidden units, batch…, 1, 1)
    offsets: list[Tensor]  # (hidden units, …): row features with the bias, and column features


def tensor_update(
    config: RuleConfig,
    weights: Weights,
    axes: Axes,
    inputs: Inputs,
    layer: FirstLayer,
    extent: Extent,
    newton_schulz_dtype: torch.dtype | None = None,
    fuse: Fuse = as_it_is,
) -> Tensor:
    """One viewed tensor's update before its norm: steps 5 to 7 of Algorithm 1."""
    channels = 1 if config.form == "d" else 2

    def outputs(block: Block) -> Sequence[Tensor]:
        kernel, *offsets = (part(x, block, stacked=True) for x in (layer.kernel, *layer.offsets))
        cut = inputs.cut(block)
        return fuse(apply_mlp)(weights, kernel, offsets, cut, axes.matrix, channels)

    shape = inputs.grad.shape
    cuts = list(blocks(shape, whole=fuse is not as_it_is))
    if len(cuts) == 1:
        planes = outputs(cuts[0])
    else:
        planes = inputs.grad.new_empty((channels, *shape), dtype=torch.float32)
        for block in cuts:
            for plane, found in zip(planes, outputs(block), strict=True):
                part(plane, block).copy_(found)
    update = FORMS[config.form](*planes, extent)
    if config.orthogonalize and axes.matrix:
        update = extent.own(newton_schulz(extent.gathered(update), dtype=newton_schulz_dtype))
    return update


def normalize_inputs(
    config: RuleConfig,
    weights: Weights,
    axes: Axes,
    param: Tensor,
    grad: Tensor,
    finite: Tensor,
    moments: Moments,
    extent: Extent,
    fuse: Fuse = as_it_is,
) -> FirstLayer:
    """The first layer for a tensor whose moments have taken the gradient in: step 4."""
    factors = factored_scales(axes, moments, extent)
    inputs = Inputs(param, grad, finite, moments.rms, moments.momentum, factors)
    parts = split_first_layer(config, weights["w0"], axes.matrix)
    squares = grad.new_zeros((len(parts[0]), *grad.shape[:-2], 1, 1), dtype=torch.float32)
    for block in blocks(grad.shape, whole=fuse is not as_it_is):
        found = fuse(sums_of_squares)(inputs.cut(block), axes.matrix)
        part(squares, block, stacked=True).add_(found)
    kernel = _normalized(parts[0], extent.mean(squares, MATRIX)).flatten(0, 1)
    bias = weights["b0"].view(-1, *[1] * grad.ndim)
    if not axes.matrix:
        return FirstLayer(factors, kernel, [bias])
    offsets = []
    both = (axes.rows, axes.cols)
    for layer, stripes, reduced in zip(parts[1:], build_stripes(moments), both, strict=True):
        # Not `in`: under torch.compile it is wrong for numbers that may change.
        kept = tuple([a for a in MATRIX if a != reduced[0]])
        squares = extent.mean(stripes.square().sum(MATRIX, keepdim=True), kept)
        offsets.append((_normalized(layer, squares) * stripes[:, None]).sum(0))
    first, second = in_order(axes, *offsets)
    return FirstLayer(factors, kernel, [first + bias, second])


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
            unit = unit + weight * plane
        units.append(unit)
    for layer, bias in layers:
        inputs = [unit.relu() for unit in units]
        units = []
        for column, unit in zip(layer.unbind(1), bias.unbind(0), strict=True):
            for weight, plane in zip(column.unbind(0), inputs, strict=True):
                unit = unit + weight * plane
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
