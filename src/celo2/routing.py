"""Who updates a tensor, the rule or AdamW, and which of its axes are its matrix.

Both follow from its path and shape. All that the rule does by rows and columns depends on the
matrix view; `Explanation` is the table that shows both to users.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from celo2.rule import REFERENCE_WIDTH, RuleConfig

Updater = Literal["rule", "adam"]
Scale = Literal["rms", "spectral"]  # which size of an update is equal for all matrices
Overrides = Mapping[str, Any]  # regex → "rule", "adam", a MatrixView or Muon's dimension numbers

EMBEDDING = re.compile(
    r"embed|^(wte|wpe|tok_emb|pos(ition(s|al)?)?(_(ids?|table|emb.*|enc.*|bias.*))?"
    r"|rel(ative)?_pos(ition)?(_.*)?|(cls|class|mask|reg|register|dist|query)_tokens?)$"
)
HEAD = re.compile(
    r"^(un_?embed.*|(.*_)?head|head_dist|lm_?head(_\d+)?|(?!pre_)(.*_)?classifier(_\d+)?"
    r"|logits?(_.*)?|readout|vocab_proj(ection)?|seq_relationship)$"
)
TOP_LEVEL_HEAD = re.compile(r"^(out|output|output_(layer|proj|projection)|fc_out)$")
VECTOR = re.compile(r"^(b|(.*_)?bias|scale|gain|beta|gamma|offset)$")
NORM = re.compile(r"norm|^ln(_|$)")
CONVOLUTION = re.compile(r"conv")
ATTENTION_IN = re.compile(r"^(q|k|v|qkv|kv|query|key|value)(_?(proj|kernel|einsum|w))?$")
ATTENTION_OUT = re.compile(r"^(o|out|output|attn_vec)(_?(proj|kernel|einsum|w))?$")
FUSED = re.compile(r"^(qkv|kv)(_?(proj|kernel|w))?$")
WRAPPERS = {"params", "model", "module", "_orig_mod"}

OUTPUT_HEAD = "output head"  # why AdamW updates a tensor, which scale="spectral" asks
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
    slice: tuple[int, ...]  # of what is skipped, or not moved, as a whole


def vector_view(ndim: int) -> MatrixView:
    """The view of a scalar or a vector: a single row."""
    return MatrixView((), (), tuple(range(ndim)))


def published_view(ndim: int) -> MatrixView:
    """The authors' layout: the last two axes are the matrix, the others a batch."""
    if ndim < 2:
        return vector_view(ndim)
    return MatrixView(tuple(range(ndim - 2)), (ndim - 2,), (ndim - 1,), published=True)


def default_view(ndim: int) -> MatrixView:
    """The view of a JAX kernel (…, in, out) by its rank alone.

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


class Route(NamedTuple):
    """Who updates a tensor, why, and how it is viewed as a matrix."""

    updater: Updater
    reason: str
    view: MatrixView


def scale_factor(scale: Scale, route: Route, stored: tuple[int, ...]) -> float:
    """The factor on an update; 1 with "rms", for vectors and for embeddings.

    An orthogonal matrix (in, out) has an RMS of 1/√max(in, out), so one of unit RMS has singular
    values of √max(in, out). With "spectral" they are √max(1, out/in) for every size, times the
    √REFERENCE_WIDTH that a square matrix of that width has with "rms". As max(1, out/in) is
    max(in, out)/in, the factor depends on `in` alone. An output head updated by AdamW, whose
    elements change by about the learning rate whatever the size, gets REFERENCE_WIDTH / in: its
    outputs then change by the same amount at every width (µP, Yang et al. 2022).

    >>> view = MatrixView((), (0,), (1,))
    >>> scale_factor("spectral", Route("rule", "matrix", view), (512, 2048))
    0.5
    >>> scale_factor("spectral", Route("adam", OUTPUT_HEAD, view), (512, 2048))
    0.25
    """
    if scale == "rms" or route.view.is_vector:
        return 1.0
    inverse_width = REFERENCE_WIDTH / max(1, route.view.shape(stored)[-2])
    if route.updater == "rule":
        return math.sqrt(inverse_width)
    return inverse_width if route.reason == OUTPUT_HEAD else 1.0


def route(
    path: str,
    shape: tuple[int, ...],
    config: RuleConfig,
    overrides: Overrides | None = None,
    published: bool = False,
) -> Route:
    """The route of the tensor at `path`, such as "block_0/attention/query/kernel".

    Celo2 leaves vectors, embeddings, position tables and output heads to AdamW; a rule with
    `vectors="rule"` takes every tensor of more than one element.
    """
    view = published_view(len(shape)) if published else named_view(path, shape)
    if is_broadcast_vector(shape) and not published:
        view = vector_view(len(shape))
    if choice := find_override(path, len(shape), view, overrides):
        return choice
    return Route(*default_updater(path, shape, view, config, published), view)


def is_broadcast_vector(shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a vector shaped to be broadcast, such as a class token or layer scale."""
    return len(shape) > 2 and max(shape) == math.prod(shape)


def find_override(
    path: str, ndim: int, view: MatrixView, overrides: Overrides | None
) -> Route | None:
    """The route of the first override that matches, None without; `view` is the default view."""
    for pattern, choice in (overrides or {}).items():
        if re.search(pattern, path):
            if choice in ("rule", "adam"):
                return Route(choice, f"override {pattern!r}", view)
            return Route("rule", f"override {pattern!r}", as_view(choice, ndim, path))
    return None


def named_view(path: str, shape: tuple[int, ...]) -> MatrixView:
    """The matrix view of a JAX kernel, from its shape and from what its path says it is."""
    names, ndim = path_names(path), len(shape)
    if ndim >= 2 and is_vector_name(path):
        return MatrixView((0,), (), tuple(range(1, ndim)))  # one vector for each of a stack
    is_convolution = any(CONVOLUTION.search(name) for name in names) or shape[:2] == (1, 1)
    if names[-1:] == ["weight"] and (ndim > 3 or (ndim == 3 and is_convolution)):
        return MatrixView((), tuple(range(1, ndim)), (0,))  # equinox: (out, in, *taps)
    if not is_convolution and (attention := _attention_view(names, shape)):
        return attention
    if ndim == 3 and is_convolution:
        return MatrixView((), (0, 1), (2,))
    return default_view(ndim)


def is_vector_name(path: str) -> bool:
    """Whether a tensor is by its name a vector, or with more axes than one a stack of vectors."""
    names = path_names(path)
    if names[-1:] == ["weight"]:
        return any(NORM.search(name) for name in names[-2:-1])
    if names[-1:] == ["b"] and any("lora" in name for name in names):
        return False  # the second matrix of a pair
    return bool(names and VECTOR.match(names[-1]))


def path_names(path: str) -> list[str]:
    """The meaningful parts of a path, in lower case: no wrappers, no list indices."""
    names = re.split(r"[/.]", path.lower())
    return [name for name in names if name and not name.isdigit() and name not in WRAPPERS]


def as_view(choice: Any, ndim: int, path: str) -> MatrixView:
    """A MatrixView from one, or from `optax.contrib.MuonDimensionNumbers`."""
    if hasattr(choice, "reduction_axis") and hasattr(choice, "output_axis"):
        rows, columns = (
            tuple(a + ndim if a < 0 else a for a in ((axes,) if isinstance(axes, int) else axes))
            for axes in (choice.reduction_axis, choice.output_axis)
        )
        batch = tuple(axis for axis in range(ndim) if axis not in (*rows, *columns))
        choice = MatrixView(batch, rows, columns)
    if not isinstance(choice, MatrixView):
        raise ValueError(
            f'{choice!r} for {path} is not "rule", "adam", a MatrixView or MuonDimensionNumbers.'
        )
    try:
        check_view(choice, ndim)
    except ValueError as error:
        raise ValueError(f"override for {path}: {error}") from None
    return choice


def check_patterns(overrides: Overrides | None) -> None:
    """Raises an error for overrides that are no dict of regular expressions."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise TypeError(
            f"overrides={overrides!r} is not a dict: give a regular expression on a parameter's "
            'path → "rule", "adam" or a MatrixView.'
        )
    for pattern in overrides or {}:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"override {pattern!r} is not a regular expression: {error}."
            ) from None


def check_overrides(overrides: Overrides | None, paths: list[str]) -> None:
    """Raises a ValueError for a pattern that is no regex or matches none of the paths, if any.

    A tree without leaves, of which `optax.tree.map_params` makes a state, fits any override.
    """
    check_patterns(overrides)
    for pattern in overrides or {}:
        if paths and not any(re.search(pattern, path) for path in paths):
            some = ", ".join(paths[:5]) + (", …" if len(paths) > 5 else "")
            raise ValueError(f"override {pattern!r} matches no parameter; the paths are {some}")


def default_updater(
    path: str, shape: tuple[int, ...], view: MatrixView, config: RuleConfig, published: bool
) -> tuple[Updater, str]:
    """Who updates a tensor by default, and why."""
    size = math.prod(shape)
    if size == 0:
        return "adam", "empty"
    if size == 1 and not (published and config.vectors == "rule"):
        return "adam", "single element"
    if config.vectors == "rule":
        return "rule", "vector" if view.is_vector else "matrix"
    if view.is_vector:
        return "adam", "vector"
    names = path_names(path)
    if any(EMBEDDING.search(name) for name in names) and not any(map(HEAD.match, names)):
        return "adam", "embedding"
    if any(map(HEAD.match, names)) or (names and TOP_LEVEL_HEAD.match(names[0])):
        return "adam", OUTPUT_HEAD
    return "rule", "matrix"


def _attention_view(names: list[str], shape: tuple[int, ...]) -> MatrixView | None:
    """The view of a kernel with an axis for heads, by itself or stacked; None for any other."""
    ndim = len(shape)
    found = [name for name in names if ATTENTION_IN.match(name)]
    if any(name.endswith("einsum") for name in found) and ndim > 2:  # gemma: (…, heads, d, width)
        return MatrixView(tuple(range(ndim - 3)), (ndim - 2,), (ndim - 3, ndim - 1))
    if any(map(FUSED.match, found)) and ndim in (4, 5) and shape[-3] in (2, 3):
        return MatrixView(tuple(range(ndim - 4)), (ndim - 4,), tuple(range(ndim - 3, ndim)))
    if ndim not in (3, 4):
        return None
    batch = tuple(range(ndim - 3))
    first, second, third = range(ndim - 3, ndim)
    if found:
        return MatrixView(batch, (first,), (second, third))
    within = any("att" in name or name == "mha" for name in names)
    if within and any(map(ATTENTION_OUT.match, names)):
        return MatrixView(batch, (first, second), (third,))
    return None


class Line(NamedTuple):
    """One tensor of the table."""

    path: str
    shape: tuple[int, ...]
    updater: str
    reason: str
    view: MatrixView
    viewed: tuple[int, ...]
    size: int


class Explanation(list[Line]):
    """The lines of the table, which `print` shows aligned with each tensor's share."""

    def share(self, updater: str) -> float:
        """The part of all parameters that `updater` ("rule" or "adam") takes."""
        total = sum(line.size for line in self)
        return sum(line.size for line in self if line.updater == updater) / max(total, 1)

    def __str__(self) -> str:
        total = sum(line.size for line in self)
        rows = [("path", "shape", "updated by", "because", "seen as", "share")]
        for line in self:
            name = "celo2" if line.updater == "rule" else "AdamW"
            seen = _join(line.viewed) if line.updater == "rule" else "-"
            share = f"{line.size / max(total, 1):.1%}"
            rows.append((line.path, _join(line.shape), name, line.reason, seen, share))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        table.insert(1, "  ".join("-" * width for width in widths))
        table.append(f"celo2 updates {self.share('rule'):.1%} of {total:,} parameters.")
        return "\n".join(table)


def _join(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
