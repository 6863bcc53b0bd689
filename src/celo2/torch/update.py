"""From features to an update: the MLP, the update form, Newton–Schulz, the output norm."""

# pyright: reportPrivateImportUsage=false
# Torch has no public names for its foreach operations.

import functools
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from celo2.routing import MATRIX, Axes
from celo2.rule import (
    CANCELLATION_LIMIT,
    CLIP_RMS,
    EPSILON,
    FACTORED_FLOOR,
    MAGNITUDE_SCALE,
    NEWTON_SCHULZ,
    NEWTON_SCHULZ_EPSILON,
    NEWTON_SCHULZ_STEPS,
    OVERSHOOT_STEP,
    RuleConfig,
    cancellation_scale,
    feature_rows,
)
from celo2.torch.features import (
    Inputs,
    Places,
    build_features,
    build_stripes,
    feature_places,
    make_inputs,
    plane_count,
    split_first_layer,
    sum_squares,
    sums_in_order,
)
from celo2.torch.moments import Moments, in_order
from celo2.torch.tensors import Extent, Plan, Stack, Sums, part

Weights = Mapping[str, Tensor]
Layers = list[tuple[Tensor, Tensor]]


def tensor_update(
    weights: Weights,
    config: RuleConfig,
    axes: Axes,
    param: Stack,
    grad: Stack,
    moments: Moments,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """The updates of a stack of viewed tensors and their new `running_rms` (Algorithm 1).

    The moments include the gradients.
    """
    inputs = make_inputs(axes, param, grad, moments, plan.extent)
    layer = normalize_inputs(weights, config, axes, inputs, moments, plan)
    outputs = apply_mlp(weights, config, axes, layer, inputs, plan)
    return finish_update(config, axes, outputs, layer.cancellation, moments, plan)


def finish_update(
    config: RuleConfig,
    axes: Axes,
    outputs: Sequence[Tensor],
    cancellation: Tensor | None,
    moments: Moments,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """The update that the MLP's outputs give, and its new `running_rms`."""
    update = FORMS[config.form](*outputs, plan.extent)
    if config.orthogonalize and axes.matrix:
        whole = plan.extent.gathered(update)
        overshoot = None
        if config.overshoot and cancellation is not None:
            overshoot = cancellation * (config.overshoot / CANCELLATION_LIMIT)
        whole = newton_schulz(whole, overshoot, dtype=plan.newton_schulz_dtype)
        update = plan.extent.own(whole)
    return normalize(config.norm, update, moments, plan.extent)


class FirstLayer(NamedTuple):
    """The MLP's first layer with each column's normaliser multiplied in."""

    kernel: Tensor  # for the planes, (columns, hidden units, batch…, 1, 1)
    offsets: list[Tensor]  # (hidden units, …): row features with the bias, and column features
    cancellation: Tensor | None  # (batch…, 1, 1), where the config needs it


def normalize_inputs(
    weights: Weights, config: RuleConfig, axes: Axes, inputs: Inputs, moments: Moments, plan: Plan
) -> FirstLayer:
    """The first layer for inputs whose columns are divided by their root mean squares."""
    shape = inputs.grad.shape
    squares = Sums()
    squared = inputs._replace(factors=tuple(f.square() for f in inputs.factors))
    arrays = len(inputs.momentum) + 3
    copies = 0 if shape[0] == 1 else arrays
    for block in plan.blocks(shape, 2 * arrays + copies):
        found = sum_squares(squared.cut(block), plan.skip_nonfinite)
        squares.add(block, found, (len(found), *shape[:-2], 1, 1), stacked=1)
    sums = sums_in_order(squares.total, axes.matrix)
    return fold_normalizers(weights, config, axes, sums, moments, plan)


def fold_normalizers(
    weights: Weights, config: RuleConfig, axes: Axes, squares: Tensor, moments: Moments, plan: Plan
) -> FirstLayer:
    """The first layer from the sums of squares of all planes, (columns, batch…, 1, 1)."""
    parts = split_first_layer(config, weights["w0"], axes.matrix)
    mean_squares = plan.extent.mean(squares, MATRIX)
    cancelled = None
    if config.gated or config.overshoot:
        at = feature_rows(config)["momentum"].start
        cancelled = cancellation(config, axes, mean_squares.select(0, at), moments, plan.extent)
    if config.gated and cancelled is not None:
        gates = split_first_layer(config, weights["g0"], axes.matrix)
        parts = open_gates(parts, gates, cancelled)
    kernel = _normalized(parts[0], mean_squares)
    bias = weights["b0"].view(-1, *[1] * (squares.ndim - 1))
    if not axes.matrix:
        return FirstLayer(kernel, [bias], cancelled)
    offsets = []
    both = (axes.rows, axes.cols)
    for layer, stripes, reduced in zip(parts[1:], build_stripes(moments), both, strict=True):
        kept = tuple(axis for axis in MATRIX if axis not in reduced)
        squares = plan.extent.mean(stripes.square().sum(MATRIX, keepdim=True), kept)
        offsets.append((_normalized(layer, squares) * stripes.unsqueeze(1)).sum(0))
    first, second = in_order(axes, *offsets)
    return FirstLayer(kernel, [first + bias, second], cancelled)


def cancellation(
    config: RuleConfig, axes: Axes, mean_square: Tensor, moments: Moments, extent: Extent
) -> Tensor:
    """How much the gradients of successive steps cancel each other, (batch…, 1, 1).

    0 where they are independent or agree, 1.5 at most; see `cancellation_scale`. `mean_square` is
    the first momentum's.
    """
    kept = tuple(axis for axis in MATRIX if axis not in axes.rows)
    rows = extent.mean(moments.rows.select(0, 0).sum(MATRIX, keepdim=True), kept)
    offset, slope = cancellation_scale(config)
    logarithm = (mean_square / (rows + FACTORED_FLOOR) + EPSILON).log()
    return (offset + slope * logarithm).clamp(0.0, CANCELLATION_LIMIT)


def open_gates(parts: list[Tensor], gates: list[Tensor], cancellation: Tensor) -> list[Tensor]:
    """The first layer's parts for each slice, (columns, hidden units, batch…, 1, 1)."""
    ones = [1] * cancellation.ndim
    return [
        part.view(*part.shape, *ones) + gate.view(*gate.shape, *ones) * cancellation
        for part, gate in zip(parts, gates, strict=True)
    ]


def _normalized(layer: Tensor, mean_square: Tensor) -> Tensor:
    """(columns, hidden units, batch…, 1, 1)."""
    layer = layer.view(*layer.shape, *[1] * (mean_square.ndim + 1 - layer.ndim))
    return layer * (mean_square + EPSILON).rsqrt().unsqueeze(1)


def apply_mlp(
    weights: Weights, config: RuleConfig, axes: Axes, layer: FirstLayer, inputs: Inputs, plan: Plan
) -> Sequence[Tensor]:
    """The MLP's outputs that the form needs: direction, then magnitude."""
    shape = inputs.grad.shape
    layers = layers_of(weights, config)
    outputs = weights["w0"].new_empty((len(layers[-1][1]), *shape)).unbind(0)
    widths = widths_of(layers)
    floats = max(plane_count(config, axes.matrix), *widths), max(widths)
    copies = 0 if shape[0] == 1 else len(inputs.momentum) + 3
    cuts = list(plan.blocks(shape, sum(floats) + copies))
    if plan.compiles:
        run = functools.partial(plan.fuse(run_units), layers)
    else:
        largest = max(part(outputs[0], cut).numel() for cut in cuts)
        memory = [outputs[0].new_empty(n * largest) for n in floats]
        arrange = functools.partial(arrange_buffers, config, axes.matrix, layers, memory)
        run = functools.partial(run_products, functools.cache(arrange))
    for cut in cuts:
        kernel = part(layer.kernel, cut, stacked=2)
        offsets = [part(x, cut, stacked=1) for x in layer.offsets]
        own = [part(output, cut) for output in outputs]
        places = [] if plan.compiles else [own]
        found = run(kernel, offsets, inputs.cut(cut), axes.matrix, plan.skip_nonfinite, *places)
        if found[0] is not own[0]:
            torch._foreach_copy_(own, list(found))
    return outputs


def layers_of(weights: Weights, config: RuleConfig) -> Layers:
    """The layers after the first; the last one has the outputs that the form needs."""
    layers = [(weights[f"w{i}"], weights[f"b{i}"]) for i in range(1, len(weights) // 2)]
    channels = 1 if config.form == "d" else 2
    weight, bias = layers.pop()
    return [*layers, (weight.narrow(1, 0, channels), bias.narrow(0, 0, channels))]


def widths_of(layers: Layers) -> list[int]:
    """How many units each hidden layer has, and how many outputs the form needs.

    The rule's config may have more: see `without_idle_units`.
    """
    return [*(len(weight) for weight, _ in layers), len(layers[-1][1])]


def run_units(
    layers: Layers,
    kernel: Tensor,
    offsets: list[Tensor],
    inputs: Inputs,
    matrix: bool,
    skip_nonfinite: bool,
) -> list[Tensor]:
    """The MLP of a block with a plane for every hidden unit: a compiler makes one loop of it."""
    planes = build_features(inputs, matrix, skip_nonfinite)
    units = []
    for h, column in enumerate(kernel.unbind(1)):
        unit: Any = sum(offset.select(0, h) for offset in offsets)
        for weight, plane in zip(column.unbind(0), planes, strict=True):
            unit = unit + weight * plane
        units.append(unit)
    for layer, bias in layers:
        values = [unit.relu() for unit in units]
        units = []
        for column, unit in zip(layer.unbind(1), bias.unbind(0), strict=True):
            for weight, plane in zip(column.unbind(0), values, strict=True):
                unit = unit + weight * plane
            units.append(unit)
    return units


class Buffers(NamedTuple):
    """Where the planes and hidden units of a block are, and what follows the first layer."""

    places: Places
    planes: Tensor  # the same as (slices, planes, elements)
    units: Tensor  # of the first layer, (slices, units, elements)
    layers: list[tuple[Tensor, Tensor, Tensor]]  # bias, weight, and where the products go


def arrange_buffers(
    config: RuleConfig, matrix: bool, layers: Layers, memory: list[Tensor], shape: tuple[int, ...]
) -> Buffers:
    """Buffers for a block of this shape: planes and hidden units alternate between two of them."""
    *batch, rows, columns = shape
    count, size, planes = math.prod(batch), rows * columns, plane_count(config, matrix)
    values, units, *others = (
        memory[i % 2].narrow(0, 0, count * n * size).view(count, n, size)
        for i, n in enumerate((planes, *widths_of(layers)))
    )
    places = feature_places(config, matrix, values.view(*batch, planes, rows, columns))
    after = [
        (bias.unsqueeze(-1), weight.mT.expand(count, -1, -1), out)
        for (weight, bias), out in zip(layers, others, strict=True)
    ]
    return Buffers(places, values, units, after)


def run_products(
    arrange: Callable[[tuple[int, ...]], Buffers],
    kernel: Tensor,
    offsets: list[Tensor],
    inputs: Inputs,
    matrix: bool,
    skip_nonfinite: bool,
    outputs: list[Tensor],
) -> Sequence[Tensor]:
    """The MLP of a block with a product of matrices for every layer.

    A single output is written in place where it is contiguous.
    """
    *batch, rows, columns = shape = tuple(inputs.grad.shape)
    buffers = arrange(shape)
    build_features(inputs, matrix, skip_nonfinite, buffers.places)
    units, offset = buffers.units, offsets[0].flatten(1)  # a vector's bias
    if matrix:
        out = units.view(*batch, units.shape[1], rows, columns)
        torch.add(*(x.movedim(0, -3) for x in offsets), out=out)
        offset = units
    kernel = kernel.flatten(2).permute(2, 1, 0)  # (slices, units, planes)
    torch.baddbmm(offset, kernel, buffers.planes, out=units)
    for bias, weight, out in buffers.layers[:-1]:
        units = torch.baddbmm(bias, weight, units.relu_(), out=out)
    bias, weight, out = buffers.layers[-1]
    direct = len(outputs) == 1 and outputs[0].is_contiguous()
    out = outputs[0].view(out.shape) if direct else out
    units = torch.baddbmm(bias, weight, units.relu_(), out=out)
    if direct:
        return outputs
    return units.view(*batch, units.shape[1], rows, columns).unbind(-3)


# Each takes the direction, the magnitude if it needs one, and the stack's extent.
FORMS: dict[str, Callable[..., Tensor]] = {
    "d": lambda d, extent: d,
    "d_exp_m": lambda d, m, extent: d * torch.exp(MAGNITUDE_SCALE * m),
    "d_exp_m_avg": lambda d, m, extent: (
        d * torch.exp(MAGNITUDE_SCALE * extent.mean(m.sum(MATRIX, keepdim=True), MATRIX))
    ),
}


def newton_schulz(
    x: Tensor,
    overshoot: Tensor | None = None,
    *,
    steps: int = NEWTON_SCHULZ_STEPS,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Pushes the singular values of `x` towards 1, over its last two axes and in place.

    Five steps leave most of them in [0.7, 1.2], and very small ones below: that is enough. An
    `overshoot`, (batch…, 1, 1), leaves large ones below small ones. The products of matrices are
    in `dtype`.
    """
    # Transposed where rows > columns: the Gram matrix is then the smaller one.
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT, overshoot, steps=steps, dtype=dtype).mT
    norm = torch.linalg.vector_norm(x, dim=MATRIX, keepdim=True)
    y = x.div_(norm + NEWTON_SCHULZ_EPSILON).to(dtype or x.dtype)
    # One matrix is multiplied as such: as a stack of one, y yᵀ takes up to 1.4 times as long.
    single = y.shape[:-2].numel() == 1
    y = y.view(y.shape[-2:]) if single else y.flatten(0, -3)
    if overshoot is not None:
        overshoot = overshoot.to(y.dtype).view(*[1, 1] if single else [-1, 1, 1])
    multiply, multiply_add = torch.matmul, torch.addmm if single else torch.baddbmm
    if single and _suits_onednn(y):
        multiply, multiply_add = _multiply, _multiply_add
    if 2 * y.shape[-1] < 3 * y.shape[-2]:
        a, b, c = NEWTON_SCHULZ
        start, early = y, None
        for step in range(1, steps + 1):
            gram = multiply(y, y.mT)
            factor = multiply_add(gram, gram, gram, beta=b, alpha=c)
            del gram
            y = _replace(y, -1, lambda some, by=factor: multiply_add(some, by, some, beta=a))
            if step == OVERSHOOT_STEP and overshoot is not None:
                early = y * overshoot
        if early is not None:
            y.sub_(early)
    else:
        start = y
        total = _gram_polynomial(multiply(y, y.mT), steps, overshoot, multiply, multiply_add)
        y = _replace(y, -1, lambda some: multiply(total, some))
    if y is not start or y.dtype != x.dtype:
        torch._foreach_copy_([x], [y.view(x.shape)])
    return x


def _replace(x: Tensor, axis: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function(x)`, for a function that works on each row or column of `x` by itself.

    On a CPU in place and in thirds: a second array of this size would be the step's largest.
    """
    if x.device.type != "cpu":
        return function(x)
    for third in x.split(-(-x.shape[axis] // 3), axis):
        torch._foreach_copy_([third], [function(third)])
    return x


def _gram_polynomial(
    gram: Tensor,
    steps: int,
    overshoot: Tensor | None,
    multiply: Callable[..., Tensor],
    multiply_add: Callable[..., Tensor],
) -> Tensor:
    """The matrix P for which P y is the result of `newton_schulz`, from gram = y yᵀ.

    The iterates are polynomials in the Gram matrix times y. For a wide y it is cheaper to multiply
    the small matrices, which commute, and to use y only once more.
    """
    a, b, c = NEWTON_SCHULZ

    def factor_of(gram: Tensor) -> Tensor:
        factor = multiply_add(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        return factor

    def times(x: Tensor, factor: Tensor) -> Tensor:
        return _replace(x, -2, lambda rows: multiply(rows, factor))

    total = factor = factor_of(gram)
    early = None
    for step in range(2, steps + 1):
        gram = times(times(gram, factor), factor)
        del factor  # its memory is for the next one
        factor = factor_of(gram)
        total = times(total, factor)
        if step == OVERSHOOT_STEP and overshoot is not None:
            early = total * overshoot
    return total if early is None else total.sub_(early)


def _suits_onednn(y: Tensor) -> bool:
    """Whether oneDNN multiplies a matrix faster than MKL, which `@` calls.

    On AMD's processors: MKL uses half the width of their registers and takes twice as long. On
    Intel's, oneDNN takes 1.3 times as long. With small matrices there is no difference.
    """
    found = torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    large = y.device.type == "cpu" and y.dtype == torch.float32 and len(y) >= 96
    return found and large and _has_amd_processor()


@functools.cache
def _has_amd_processor() -> bool:
    file = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (file.read_text() if file.exists() else platform.processor())


def _multiply(x: Tensor, y: Tensor) -> Tensor:
    # The operation that torch.compile uses for a Linear on a CPU. It is slow on part of a matrix.
    y = y if y.mT.is_contiguous() else y.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, y.mT, None, "none", [], "")


def _multiply_add(z: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _multiply(x, y).mul_(alpha).add_(z, alpha=beta)


def normalize(norm: str, update: Tensor, moments: Moments, extent: Extent) -> tuple[Tensor, Tensor]:
    """The update scaled in place, slice by slice, and the new `running_rms`."""
    length = torch.linalg.vector_norm(update, dim=MATRIX, keepdim=True)
    size = (extent.mean(length.square(), MATRIX) + EPSILON).sqrt()
    scale, running_rms = NORMS[norm](size, moments)
    return update.mul_(scale), running_rms


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
