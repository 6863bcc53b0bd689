"""The MLP's input: one tensor's gradient, parameter and moments as feature columns."""

from typing import NamedTuple

import torch
from torch import Tensor

from celo2.routing import Axes
from celo2.rule import CLIP, FACTORED_EPSILON, RMS_EPSILON, RuleConfig, feature_rows
from celo2.torch.blocks import Block, Extent, part
from celo2.torch.moments import Moments, clean_gradient, in_order


class Inputs(NamedTuple):
    """All that the columns of a viewed tensor are made of, or of a block of one."""

    param: Tensor
    grad: Tensor
    finite: Tensor
    rms: Tensor
    momentum: tuple[Tensor, ...]
    factors: tuple[Tensor, ...]  # (decays, …), whose product stands for 1/√second moment

    def cut(self, block: Block) -> "Inputs":
        """The inputs of a block."""
        param, grad, finite, rms = (part(x, block) for x in self[:4])
        momentum = tuple(part(m, block) for m in self.momentum)
        factors = tuple(part(f, block, stacked=True) for f in self.factors)
        return Inputs(param, grad, finite, rms, momentum, factors)


def build_planes(inputs: Inputs, matrix: bool) -> list[Tensor]:
    """The columns that are as large as the tensor, in the order of `split_first_layer`."""
    grad = clean_gradient(inputs.grad, inputs.finite)
    rms = inputs.rms
    inverse_rms = (rms + RMS_EPSILON).rsqrt()
    momentum = [m.float() for m in inputs.momentum]

    def factored(x: Tensor, decay: int) -> Tensor:
        for factor in inputs.factors:
            x = x * factor[decay]
        return x

    decays = range(len(momentum))
    planes = [
        grad,
        grad.clamp(-CLIP, CLIP),
        inputs.param.float(),
        *momentum,
        rms,
        *(m * inverse_rms for m in momentum),
        inverse_rms,
        *(factored(grad, i) for i in decays),
        grad * inverse_rms,
    ]
    if matrix:
        planes += [factored(momentum[i], i) for i in decays]
    return planes


def build_stripes(moments: Moments) -> tuple[Tensor, Tensor]:
    """Row and column features, (columns, …): never spread over the tensor."""
    rows, cols = (torch.cat([x, (x + RMS_EPSILON).rsqrt()]) for x in (moments.rows, moments.cols))
    return rows, cols


def split_first_layer(config: RuleConfig, kernel: Tensor, matrix: bool) -> list[Tensor]:
    """The first layer's rows for the planes, for the rows and for the columns."""
    at = feature_rows(config)
    if not matrix:
        return [kernel[: at["row"].start]]
    momenta = kernel[at["factored_momentum"]]
    return [
        torch.cat([kernel[: at["row"].start], momenta]),
        torch.cat([kernel[at["row"]], kernel[at["inverse_row"]]]),
        torch.cat([kernel[at["column"]], kernel[at["inverse_column"]]]),
    ]


def factored_scales(axes: Axes, moments: Moments, extent: Extent) -> tuple[Tensor, ...]:
    """(decays, …) factors whose product stands for 1/√second moment, in the order of their axes."""
    rows, cols = moments.rows, moments.cols
    if not axes.matrix:
        return (_floored_rsqrt(rows + FACTORED_EPSILON),)
    mean = extent.mean(rows.sum(axes.cols, keepdim=True), axes.cols)
    row_scale = _floored_rsqrt(rows / (mean + FACTORED_EPSILON))
    return in_order(axes, row_scale, _floored_rsqrt(cols))


def _floored_rsqrt(x: Tensor) -> Tensor:
    return x.clamp(min=FACTORED_EPSILON).rsqrt()
