"""Moments, features and MLP of a stack of matrices in three Triton launches.

The first sums squares of the gradients, the second those of the features, the third reads every
statistic once more and writes momenta, `rms` and direction. Between them are small arrays only,
and what is done with these is the eager step's own code. The temporaries are the direction and
some hundredth of it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# To a type checker, what Triton compiles is not Python.

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from celo2.routing import Axes
from celo2.rule import CLIP, GRADIENT_LIMIT, RMS_EPSILON, RuleConfig
from celo2.torch.features import factored_scales, plane_count
from celo2.torch.moments import Moments, count_moves, find_moving, find_rates, update_factored
from celo2.torch.tensors import Plan, Stack
from celo2.torch.update import FirstLayer, Layers, Weights, fold_normalizers, layers_of, widths_of

TILE = 128  # elements that a program of the second and third launch has
ROWS, COLUMNS = 32, 64  # and of the first
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def can_run(axes: Axes, param: Stack, grad: Stack, moments: Moments, plan: Plan) -> bool:
    """Whether the kernels are made for a stack: whole matrices, factored over their own axes."""
    stacks = (param, grad, moments.rms, *moments.momentum)
    return (
        axes.matrix
        and {*axes.rows, *axes.cols} == {-2, -1}
        and plan.extent.shards is None
        and all(stack.members[0].dtype in DTYPES for stack in stacks)
        and param.members[0].numel() > 0
    )


def triton_outputs(
    weights: Weights,
    config: RuleConfig,
    axes: Axes,
    param: Stack,
    grad: Stack,
    moments: Moments,
    plan: Plan,
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Updates the moments; returns the MLP's outputs, the cancellation and which slices move."""
    arrays = (grad, param, moments.rms, *moments.momentum)
    *batch, rows, columns = shape = arrays[0].shape
    table = _table(arrays)
    slices, decays = len(table), len(moments.momentum)
    like = weights["w0"]
    dtypes = [DTYPES[stack.members[0].dtype] for stack in arrays[:4]]
    shared = {"R": rows, "C": columns, "SKIP": plan.skip_nonfinite, "ARRAYS": len(arrays)}
    shared |= {"GRAD": dtypes[0], "LIMIT": GRADIENT_LIMIT}

    tiles = triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS)
    by_row, by_column = (
        like.new_empty(slices, tiles[1], rows),
        like.new_empty(slices, tiles[0], columns),
    )
    peaks = like.new_empty(slices, *tiles)
    sum_gradients[(slices, *tiles)](table, by_row, by_column, peaks, **shared, BR=ROWS, BC=COLUMNS)
    peak = peaks.amax((-2, -1)).view(*batch, 1, 1)
    finite, moving = find_moving(peak, moments, plan)
    # By the axis that is summed over: the first one for columns.
    sums = by_column.sum(1).view(*batch, 1, columns), by_row.sum(1).view(*batch, rows, 1)
    by_decay = find_rates(config, finite)
    update_factored(config, axes, sums, by_decay, moments, plan)
    count_moves(moments, moving, finite)

    first, second = (f.contiguous() for f in factored_scales(axes, moments, plan.extent))
    planes = plane_count(config, True)
    shared |= {"PARAM": dtypes[1], "RMS": dtypes[2], "MOMENTUM": dtypes[3], "DECAYS": decays}
    shared |= {"CLIP": CLIP, "EPSILON": RMS_EPSILON, "SLICES": slices, "N": TILE}
    rates = [by_decay[decay] for decay in (*config.momentum_decays, config.rms_decay)]
    rates = torch.stack(rates).view(decays + 1, slices)
    grid = slices, triton.cdiv(rows * columns, TILE)
    fixed = table, rates, first, second
    width = triton.next_power_of_2(planes)
    found = like.new_empty(*grid, width)
    none = (like,) * 5
    run_tiles[grid](
        *fixed, *none, found, **shared, SUMS=True, P=width, H=width, U=1, LAYERS=0, OUT=1
    )
    squares = found.sum(1).narrow(-1, 0, planes).movedim(-1, 0).reshape(planes, *batch, 1, 1)

    layer = fold_normalizers(weights, config, axes, squares, moments, plan)
    layers = layers_of(weights, config)
    widths = widths_of(layers)
    hidden = max(16, *(triton.next_power_of_2(n) for n in widths))
    packed = _pack(layer, layers, slices, hidden)
    outputs = like.new_empty(len(layers[-1][1]), *shape)
    run_tiles[grid](
        *fixed,
        *packed,
        outputs,
        **shared,
        SUMS=False,
        P=planes,
        H=hidden,
        U=widths[0],
        LAYERS=len(layers),
        OUT=len(outputs),
    )
    return list(outputs.unbind(0)), layer.cancellation, moving


def _table(arrays: tuple[Stack, ...]) -> Tensor:
    """Where each array of each slice is, and its strides: (slices, arrays, 3)."""
    slices = zip(*(_matrices(stack) for stack in arrays), strict=True)
    rows = tuple(tuple((x.data_ptr(), *x.stride()) for x in matrices) for matrices in slices)
    return _upload(rows, arrays[0].members[0].device)


@functools.lru_cache(maxsize=256)  # sent once: a CUDA graph could not capture it
def _upload(rows: tuple, device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _matrices(stack: Stack) -> list[Tensor]:
    found = list(stack.members)
    while found[0].ndim > 2:
        found = [x for some in found for x in some.unbind(0)]
    return found


def _pack(layer: FirstLayer, layers: Layers, slices: int, hidden: int) -> tuple[Tensor, ...]:
    """The MLP with every layer as wide as the widest: kernel, offsets, layers, biases."""
    kernel = layer.kernel.flatten(2).permute(2, 0, 1)  # (slices, planes, units)
    kernel = torch.nn.functional.pad(kernel, (0, hidden - kernel.shape[-1])).contiguous()
    offsets = [x.reshape(len(x), slices, -1).contiguous() for x in layer.offsets]
    weights = kernel.new_zeros(len(layers), hidden, hidden)
    biases = kernel.new_zeros(len(layers), hidden)
    for i, (weight, bias) in enumerate(layers):
        weights[i, : weight.shape[1], : weight.shape[0]] = weight.mT
        biases[i, : len(bias)] = bias
    return kernel, *offsets, weights, biases


@triton.jit
def load_array(table, slice, index, r, c, mask, ARRAYS: tl.constexpr, DTYPE: tl.constexpr):
    entry = table + (slice * ARRAYS + index) * 3
    start = tl.load(entry).to(tl.pointer_type(DTYPE))
    places = start + r * tl.load(entry + 1) + c * tl.load(entry + 2)
    return places, tl.load(places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def clean(grad, LIMIT: tl.constexpr, SKIP: tl.constexpr):
    clipped = tl.minimum(tl.maximum(grad, -LIMIT), LIMIT)
    if SKIP:
        return tl.where(grad == grad, clipped, 0.0)
    else:
        return tl.where(grad == grad, clipped, grad)


@triton.jit
def sum_gradients(
    table,
    by_row,
    by_column,
    peaks,
    R,
    C,
    SKIP: tl.constexpr,
    ARRAYS: tl.constexpr,
    GRAD: tl.constexpr,
    LIMIT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Sums of a tile's squares over its columns and its rows, and its largest absolute value."""
    slice, i, j = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, c = i * BR + tl.arange(0, BR), j * BC + tl.arange(0, BC)
    mask = (r < R)[:, None] & (c < C)[None, :]
    _, grad = load_array(table, slice, 0, r[:, None], c[None, :], mask, ARRAYS, GRAD)
    size = tl.where(grad == grad, tl.abs(grad), float("inf"))
    tl.store(peaks + (slice * tl.num_programs(1) + i) * tl.num_programs(2) + j, tl.max(size))
    grad = clean(grad, LIMIT, SKIP)
    square = grad * grad
    tl.store(by_row + (slice * tl.num_programs(2) + j) * R + r, tl.sum(square, 1), mask=r < R)
    tl.store(by_column + (slice * tl.num_programs(1) + i) * C + c, tl.sum(square, 0), mask=c < C)


@triton.jit
def take_plane(
    total, plane, mask, place, kernel, SUMS: tl.constexpr, P: tl.constexpr, H: tl.constexpr
):
    """Adds a plane's square to the sums, or the plane to the hidden units."""
    if SUMS:
        square = tl.sum(tl.where(mask, plane * plane, 0.0), 0)
        return total + tl.where(tl.arange(0, P) == place, square, 0.0)
    else:
        weight = tl.load(kernel + place * H + tl.arange(0, H))
        return total + weight[:, None] * plane[None, :]


@triton.jit
def run_tiles(
    table,
    rates,
    first,
    second,
    kernel,
    first_offset,
    second_offset,
    layers,
    biases,
    out,
    R,
    C,
    SKIP: tl.constexpr,
    ARRAYS: tl.constexpr,
    GRAD: tl.constexpr,
    LIMIT: tl.constexpr,
    PARAM: tl.constexpr,
    RMS: tl.constexpr,
    MOMENTUM: tl.constexpr,
    DECAYS: tl.constexpr,
    CLIP: tl.constexpr,
    EPSILON: tl.constexpr,
    SLICES: tl.constexpr,
    N: tl.constexpr,
    SUMS: tl.constexpr,
    P: tl.constexpr,
    H: tl.constexpr,
    U: tl.constexpr,
    LAYERS: tl.constexpr,
    OUT: tl.constexpr,
):
    """The features of a tile, in the order of `build_features`: their sums, or the MLP of them."""
    slice, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tile.to(tl.int64) * N + tl.arange(0, N)
    r, c = place // C, place % C
    mask = r < R
    _, grad = load_array(table, slice, 0, r, c, mask, ARRAYS, GRAD)
    grad = clean(grad, LIMIT, SKIP)
    _, param = load_array(table, slice, 1, r, c, mask, ARRAYS, PARAM)
    places, rms = load_array(table, slice, 2, r, c, mask, ARRAYS, RMS)
    rms += tl.load(rates + DECAYS * SLICES + slice) * (grad * grad - rms)
    if not SUMS:
        tl.store(places, rms.to(RMS), mask=mask)
    inverse = 1.0 / tl.sqrt(rms + EPSILON)
    unit = tl.arange(0, H)
    if SUMS:
        total = tl.zeros([P], tl.float32)
    else:
        kernel += slice * P * H
        known = (unit < U)[:, None] & mask[None, :]
        at = unit[:, None] * SLICES + slice
        total = tl.load(first_offset + at * C + c[None, :], mask=known, other=0.0)
        total += tl.load(second_offset + at * R + r[None, :], mask=known, other=0.0)
    clipped = tl.minimum(tl.maximum(grad, -CLIP), CLIP)
    total = take_plane(total, grad, mask, 0, kernel, SUMS, P, H)
    total = take_plane(total, clipped, mask, 1, kernel, SUMS, P, H)
    total = take_plane(total, param, mask, 2, kernel, SUMS, P, H)
    for i in tl.static_range(DECAYS):
        places, momentum = load_array(table, slice, 3 + i, r, c, mask, ARRAYS, MOMENTUM)
        momentum += tl.load(rates + i * SLICES + slice) * (grad - momentum)
        stored = momentum.to(MOMENTUM)
        if not SUMS:
            tl.store(places, stored, mask=mask)
        momentum = stored.to(tl.float32)
        scale = tl.load(first + (i * SLICES + slice) * C + c, mask=mask, other=0.0)
        scale *= tl.load(second + (i * SLICES + slice) * R + r, mask=mask, other=0.0)
        total = take_plane(total, momentum, mask, 3 + i, kernel, SUMS, P, H)
        total = take_plane(total, momentum * inverse, mask, 4 + DECAYS + i, kernel, SUMS, P, H)
        total = take_plane(total, grad * scale, mask, 5 + 2 * DECAYS + i, kernel, SUMS, P, H)
        total = take_plane(total, momentum * scale, mask, 6 + 3 * DECAYS + i, kernel, SUMS, P, H)
    total = take_plane(total, rms, mask, 3 + DECAYS, kernel, SUMS, P, H)
    total = take_plane(total, inverse, mask, 4 + 2 * DECAYS, kernel, SUMS, P, H)
    total = take_plane(total, grad * inverse, mask, 5 + 3 * DECAYS, kernel, SUMS, P, H)
    if SUMS:
        tl.store(out + (slice * tl.num_programs(1) + tile) * P + tl.arange(0, P), total)
    else:
        for i in tl.static_range(LAYERS):
            weight = tl.load(layers + (i * H + unit[:, None]) * H + unit[None, :])
            bias = tl.load(biases + i * H + unit)
            units = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
            total = tl.dot(weight, units, input_precision="ieee") + bias[:, None]
        for i in tl.static_range(OUT):
            values = tl.sum(tl.where((unit == i)[:, None], total, 0.0), 0)
            tl.store(out + (i * SLICES + slice) * R * C + place, values, mask=mask)
