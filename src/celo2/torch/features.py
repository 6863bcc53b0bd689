"""The MLP's input: one tensor's gradient, parameter and moments as feature columns."""

# pyright: reportPrivateImportUsage=false
# Torch has no public names for its foreach operations.

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from celo2.routing import MATRIX, Axes
from celo2.rule import CLIP, FACTORED_EPSILON, FEATURES, RMS_EPSILON, RuleConfig, feature_rows
from celo2.torch.moments import Moments, clean_gradient, in_order
from celo2.torch.tensors import Block, Extent, Stack, part, take

Places = dict[str, Any]

# The features that are as large as the tensor, in the order of the first layer's rows.
STRIPES = ("row", "column", "inverse_row", "inverse_column")
PLANES = tuple(feature.name for feature in FEATURES if feature.name not in STRIPES)


class Inputs(NamedTuple):
    """What a block's columns are computed from; the moments include the gradient."""

    param: Any  # a Tensor, or the Stack that blocks are cut from; so are the next three
    grad: Any
    rms: Any
    momentum: Sequence[Any]
    factors: tuple[Tensor, ...]  # (decays, …): their product is 1/√second moment

    def cut(self, block: Block) -> "Inputs":
        """The inputs of a block of a stack."""
        own = take((*self[:3], *self.momentum), block)
        param, grad, rms, *momentum = (x.float() for x in own)
        factors = tuple(part(f, block, stacked=1) for f in self.factors)
        return Inputs(param, grad, rms, momentum, factors)


def make_inputs(axes: Axes, param: Stack, grad: Stack, moments: Moments, extent: Extent) -> Inputs:
    """The inputs of a stack of viewed tensors."""
    factors = factored_scales(axes, moments, extent)
    return Inputs(param, grad, moments.rms, moments.momentum, factors)


def build_features(
    inputs: Inputs, matrix: bool, skip_nonfinite: bool, out: Places | None = None
) -> list[Tensor]:
    """The columns that are as large as the tensor, in the order of `split_first_layer`.

    A list of planes, for a compiler to fuse; or all of them in the places that `out` names.
    """
    at: Places = dict.fromkeys(PLANES) if out is None else out
    grad = inputs.grad if out is None else inputs.grad.unsqueeze(-3)
    grad = clean_gradient(grad, skip_nonfinite, at["gradient"])
    clipped = torch.clamp(grad, -CLIP, CLIP, out=at["clipped_gradient"])
    param, momentum, rms = inputs.param, inputs.momentum, inputs.rms
    if out is not None:
        torch.stack([param, *momentum, rms], -3, out=at["stored"])
        param, momentum, rms = at["parameter"], at["momentum"], at["rms"]
    inverse_rms = torch.add(rms, RMS_EPSILON, out=at["inverse_rms"]).rsqrt_()
    over_rms = _multiply_planes(momentum, inverse_rms, at["momentum_over_rms"])
    scales = _scales(inputs.factors, at["factored_gradient"])
    momenta = _multiply_planes(momentum, scales, at["factored_momentum"]) if matrix else []
    gradients = _multiply_planes(scales, grad, at["factored_gradient"])
    grad_over_rms = torch.mul(grad, inverse_rms, out=at["gradient_over_rms"])
    if out is not None:
        return []
    firsts = [grad, clipped, param, *momentum, rms, *over_rms, inverse_rms]
    return [*firsts, *gradients, grad_over_rms, *momenta]


def feature_places(config: RuleConfig, matrix: bool, out: Tensor) -> Places:
    """The parts of `out` that features go to, all their planes on axis -3."""
    names, widths = PLANES[: None if matrix else -1], feature_widths(config)
    parts = out.split([widths[name] for name in names], -3)
    # They follow each other: one operation copies them all.
    stored = sum(widths[name] for name in ("parameter", "momentum", "rms"))
    places = dict(zip(names, parts, strict=True))
    return places | {"stored": out.narrow(-3, 2, stored)}


def feature_widths(config: RuleConfig) -> dict[str, int]:
    return {name: rows.stop - rows.start for name, rows in feature_rows(config).items()}


def plane_count(config: RuleConfig, matrix: bool) -> int:
    return sum(feature_widths(config)[name] for name in PLANES[: None if matrix else -1])


def _scales(factors: tuple[Tensor, ...], out: Tensor | None) -> Any:
    """1/√second moment, a plane for each decay."""
    if out is None:
        return [f if len(factors) == 1 else f * factors[1][i] for i, f in enumerate(factors[0])]
    factors = tuple(f.movedim(0, -3) for f in factors)
    if len(factors) == 1:
        torch._foreach_copy_([out], [factors[0].expand_as(out)])
        return out
    return torch.mul(*factors, out=out)


def _multiply_planes(xs: Any, ys: Any, out: Tensor | None) -> Any:
    """Products plane by plane; `ys` is one plane for all, or one for each."""
    if out is not None:
        return torch.mul(xs, ys, out=out)
    ys = ys if isinstance(ys, list) else [ys] * len(xs)
    return [x * y for x, y in zip(xs, ys, strict=True)]


def sum_squares(inputs: Inputs, skip_nonfinite: bool) -> Tensor:
    """The sums of squares of a block's planes, (columns, batch…, 1, 1), for `sums_in_order`.

    `inputs` have squared factors. No planes are made: squares are summed over rows before they are
    multiplied by a factor of the rows.
    """
    grad = clean_gradient(inputs.grad, skip_nonfinite)
    singles = (grad.clamp(-CLIP, CLIP), inputs.param, inputs.rms)
    squares = torch.stack([*singles, grad, *inputs.momentum], -3).square_()
    inverse = (inputs.rms + RMS_EPSILON).reciprocal_()
    plain = squares.sum(MATRIX)
    squares = squares.narrow(-3, len(singles), 1 + len(inputs.momentum))
    over_rms = _weighted_sums(squares.flatten(-2), inverse.flatten(-2))
    factored = _factored_sums(squares, [f.movedim(0, -3) for f in inputs.factors])
    sums = torch.cat([plain, over_rms, inverse.sum(MATRIX).unsqueeze(-1), *factored], -1)
    return sums.movedim(-1, 0).unsqueeze(-1).unsqueeze(-1)


def sums_in_order(sums: Tensor, matrix: bool) -> Tensor:
    """The results of `sum_squares` in the order of `split_first_layer`."""
    decays = (len(sums) - 6) // 4
    split = sums.split((1, 1, 1, 1, decays, 1, decays, 1, decays, decays))
    clipped, param, rms, grad, momentum, grad_over_rms, over_rms, inverse, *factored = split
    firsts = [grad, clipped, param, momentum, rms, over_rms, inverse]
    return torch.cat([*firsts, factored[0], grad_over_rms, *factored[1:]][: None if matrix else -1])


def _weighted_sums(planes: Tensor, weights: Tensor) -> Tensor:
    """(batch…, planes) from (batch…, planes, elements) and (batch…, elements)."""
    if planes.shape[:-2].numel() > 1:
        return (planes @ weights.unsqueeze(-1)).squeeze(-1)
    # One matrix is multiplied as such: as a stack of one it takes twice as long.
    sums = planes.flatten(0, -2) @ weights.flatten()
    return sums.view(planes.shape[:-1])


def _factored_sums(squares: Tensor, factors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of factored gradients and momenta, (batch…, decays) each, from (batch…, 1 + decays, ·, ·)."""
    grad, momentum = squares.split((1, squares.shape[-3] - 1), -3)
    first, *rest = factors
    if rest and first.shape[-2] == rest[0].shape[-1] == 1:
        # All planes by all decays: one product of large matrices takes less time than some small.
        by_rows = first.squeeze(-2) @ squares.flatten(-3, -2).mT  # (batch…, decays, planes · rows)
        by_rows = by_rows.unflatten(-1, squares.shape[-3:-1])
        sums = (by_rows @ rest[0]).squeeze(-1)  # (batch…, decays, planes)
        return sums.select(-1, 0), sums.narrow(-1, 1, sums.shape[-2]).diagonal(dim1=-2, dim2=-1)
    # A vector, or factors over axes of a batch, as the published layout may have them.
    scales = first * rest[0] if rest else first
    return (grad * scales).sum(MATRIX), (momentum * scales).sum(MATRIX)


def build_stripes(moments: Moments) -> tuple[Tensor, Tensor]:
    """Row and column features, (columns, …): never spread over the tensor."""
    rows, cols = (torch.cat([x, (x + RMS_EPSILON).rsqrt()]) for x in (moments.rows, moments.cols))
    return rows, cols


def split_first_layer(config: RuleConfig, kernel: Tensor, matrix: bool) -> list[Tensor]:
    """The first layer's rows for the planes, for the rows and for the columns."""
    names = PLANES[: None if matrix else -1], ("row", "inverse_row"), ("column", "inverse_column")
    widths = feature_widths(config)
    of = dict(zip(widths, kernel.split(list(widths.values())), strict=True))
    return [torch.cat([of[name] for name in some]) for some in names[: None if matrix else 1]]


def factored_scales(axes: Axes, moments: Moments, extent: Extent) -> tuple[Tensor, ...]:
    """(decays, …) factors whose product is about 1/√second moment, in the order of their axes."""
    rows, cols = moments.rows, moments.cols
    if not axes.matrix:
        return (_floored_rsqrt(rows + FACTORED_EPSILON),)
    mean = extent.mean(rows.sum(axes.cols, keepdim=True), axes.cols)
    row_scale = _floored_rsqrt(rows / (mean + FACTORED_EPSILON))
    return in_order(axes, row_scale, _floored_rsqrt(cols))


def _floored_rsqrt(x: Tensor) -> Tensor:
    return x.clamp(min=FACTORED_EPSILON).rsqrt()
