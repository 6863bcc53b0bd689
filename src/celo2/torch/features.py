"""The MLP's input: one tensor's gradient, parameter and moments as feature columns."""

# pyright: reportPrivateImportUsage=false
# Torch has no public names for its foreach operations.

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from celo2.routing import MATRIX, Axes
from celo2.rule import CLIP, FACTORED_EPSILON, RMS_EPSILON, RuleConfig, feature_count, feature_rows
from celo2.torch.blocks import Block, Stack, part, take
from celo2.torch.moments import Moments, clean_gradient, in_order
from celo2.torch.tensors import Extent

Planes = list[Tensor] | Tensor


class Inputs(NamedTuple):
    """All that the columns of a block are made of; the moments have taken the gradient in."""

    param: Any  # a Tensor, or the Stack that blocks are cut from; so are the next three
    grad: Any
    rms: Any
    momentum: Sequence[Any]
    factors: tuple[Tensor, ...]  # (decays, …): their product is 1/√second moment

    def cut(self, block: Block) -> "Inputs":
        """The inputs of a block of a stack."""
        own = take((*self[:3], *self.momentum), block)
        param, grad, rms, *momentum = (x.float() for x in own)
        factors = tuple(part(f, block, stacked=True) for f in self.factors)
        return Inputs(param, grad, rms, momentum, factors)


def make_inputs(axes: Axes, param: Stack, grad: Stack, moments: Moments, extent: Extent) -> Inputs:
    """The inputs of a stack of viewed tensors."""
    factors = factored_scales(axes, moments, extent)
    return Inputs(param, grad, moments.rms, moments.momentum, factors)


def build_features(
    inputs: Inputs, matrix: bool, skip_nonfinite: bool, out: Tensor | None = None
) -> Planes:
    """The columns that are as large as the tensor, in the order of `split_first_layer`.

    They are planes of a block, on axis -3 of `out`; or a list, for a compiler to fuse.
    """
    at = _places(len(inputs.momentum), matrix)

    def place(name: str) -> Any:
        return None if out is None else out.narrow(-3, *at[name])

    def single(name: str) -> Any:
        return None if out is None else out.select(-3, at[name][0])

    grad = clean_gradient(inputs.grad, skip_nonfinite, single("gradient"))
    clipped = torch.clamp(grad, -CLIP, CLIP, out=single("clipped_gradient"))
    if out is None:
        param, *momentum, rms = (x.float() for x in (inputs.param, *inputs.momentum, inputs.rms))
    else:
        # They follow each other: one operation copies them all.
        stored = [inputs.param, *inputs.momentum, inputs.rms]
        torch.stack(stored, -3, out=out.narrow(-3, at["parameter"][0], len(stored)))
        param, momentum, rms = single("parameter"), place("momentum"), single("rms")
    inverse_rms = torch.add(rms, RMS_EPSILON, out=single("inverse_rms"))
    inverse_rms = inverse_rms.rsqrt() if out is None else inverse_rms.rsqrt_()
    over_rms = _multiply(momentum, inverse_rms, place("momentum_over_rms"))
    scales = _scales(inputs.factors, place("factored_gradient"))
    momenta = _multiply(momentum, scales, place("factored_momentum")) if matrix else []
    gradients = _multiply(scales, grad, place("factored_gradient"))
    grad_over_rms = torch.mul(grad, inverse_rms, out=single("gradient_over_rms"))
    if out is not None:
        return out
    firsts = [grad, clipped, param, *momentum, rms, *over_rms, inverse_rms]
    return [*firsts, *gradients, grad_over_rms, *momenta]


def _places(decays: int, matrix: bool) -> dict[str, tuple[int, int]]:
    """The first plane of each feature, and how many it has."""
    widths = {
        "gradient": 1,
        "clipped_gradient": 1,
        "parameter": 1,
        "momentum": decays,
        "rms": 1,
        "momentum_over_rms": decays,
        "inverse_rms": 1,
        "factored_gradient": decays,
        "gradient_over_rms": 1,
        "factored_momentum": decays if matrix else 0,
    }
    places, start = {}, 0
    for name, width in widths.items():
        places[name] = start, width
        start += width
    return places


def plane_count(config: RuleConfig, matrix: bool) -> int:
    return sum(width for _, width in _places(len(config.momentum_decays), matrix).values())


def _scales(factors: tuple[Tensor, ...], out: Tensor | None) -> Planes:
    """1/√second moment, a plane for each decay."""
    if out is None:
        return [f if len(factors) == 1 else f * factors[1][i] for i, f in enumerate(factors[0])]
    factors = tuple(f.movedim(0, -3) for f in factors)
    if len(factors) == 1:
        torch._foreach_copy_([out], [factors[0].expand_as(out)])
        return out
    return torch.mul(*factors, out=out)


def _multiply(xs: Planes, ys: Planes, out: Tensor | None) -> Planes:
    """Plane by plane, with one plane for all or one for each."""
    if out is None:
        ys = ys if isinstance(ys, list) else [ys] * len(xs)
        return [x * y for x, y in zip(xs, ys, strict=True)]
    assert isinstance(xs, Tensor) and isinstance(ys, Tensor)
    return torch.mul(xs, ys if ys.ndim == xs.ndim else ys.unsqueeze(-3), out=out)


def sum_squares(inputs: Inputs, matrix: bool, skip_nonfinite: bool) -> Tensor:
    """The sums of squares of a block's planes, (columns, batch…, 1, 1), in their order.

    The factors come squared. No planes are made: sums over rows are taken before a factor of the
    rows comes in.
    """
    grad = clean_gradient(inputs.grad, skip_nonfinite)
    squares = torch.stack([grad, *inputs.momentum], -3).float().square_()
    inverse = (inputs.rms + RMS_EPSILON).reciprocal_()
    plain = squares.sum(MATRIX)
    over_rms = (squares.flatten(-2) @ inverse.flatten(-2).unsqueeze(-1)).squeeze(-1)
    gradients, momenta = _factored_sums(squares, [f.movedim(0, -3) for f in inputs.factors])
    singles = (grad.clamp(-CLIP, CLIP), inputs.param.float(), inputs.rms)
    lengths = [torch.linalg.vector_norm(x, dim=MATRIX) for x in singles]
    clipped, param, rms = torch.stack(lengths, -1).square().split(1, -1)
    sizes = (1, len(inputs.momentum))
    (of_grad, of_momentum), (grad_over_rms, over_rms) = (
        x.split(sizes, -1) for x in (plain, over_rms)
    )
    sums = [of_grad, clipped, param, of_momentum, rms, over_rms]
    sums += [inverse.sum(MATRIX).unsqueeze(-1), gradients, grad_over_rms]
    sums = torch.cat([*sums, momenta] if matrix else sums, -1)
    return sums.movedim(-1, 0).unsqueeze(-1).unsqueeze(-1)


def _factored_sums(squares: Tensor, factors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of factored gradients and momenta, (batch…, decays) each, from (batch…, 1 + decays, ·, ·)."""
    grad, momentum = squares.split((1, squares.shape[-3] - 1), -3)
    first, *rest = factors
    if rest and first.shape[-2] == rest[0].shape[-1] == 1:
        by_rows = grad.squeeze(-3) @ first.squeeze(-2).mT  # (batch…, rows, decays)
        gradients = (by_rows * rest[0].squeeze(-1).mT).sum(-2)
        return gradients, ((momentum @ first.mT) * rest[0]).sum(MATRIX)
    # A vector, or factors over axes of a batch, as the published layout may have them.
    scales = first * rest[0] if rest else first
    return (grad * scales).sum(MATRIX), (momentum * scales).sum(MATRIX)


def build_stripes(moments: Moments) -> tuple[Tensor, Tensor]:
    """Row and column features, (columns, …): never spread over the tensor."""
    rows, cols = (torch.cat([x, (x + RMS_EPSILON).rsqrt()]) for x in (moments.rows, moments.cols))
    return rows, cols


def split_first_layer(config: RuleConfig, kernel: Tensor, matrix: bool) -> list[Tensor]:
    """The first layer's rows for the planes, for the rows and for the columns."""
    if not matrix:
        return [kernel.narrow(0, 0, feature_count(config, vector=True))]
    widths = [rows.stop - rows.start for rows in feature_rows(config).values()]
    of = dict(zip(feature_rows(config), kernel.split(widths), strict=True))
    stripes = (("row", "inverse_row"), ("column", "inverse_column"))
    large = [name for name in of if not any(name in pair for pair in stripes)]
    return [torch.cat([of[name] for name in names]) for names in (large, *stripes)]


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
