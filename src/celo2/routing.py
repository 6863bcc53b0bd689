"""Who updates a tensor, the rule or AdamW, and in which matrix view: from its path and shape."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from celo2.layout import MatrixView, check_view, default_view, published_view, vector_view
from celo2.rule import RuleConfig

Updater = Literal["rule", "adam"]
Overrides = Mapping[str, Any]  # regex → "rule", "adam", a MatrixView or Muon's dimension numbers

EMBEDDING = re.compile(
    r"embed|^(wte|wpe|tok_emb|pos_emb|pos_table|position(s|al)?(_(ids?|table|emb.*|enc.*|bias.*))?"
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


class Route(NamedTuple):
    """One tensor's way: who updates it, why, and how it is seen as a matrix."""

    updater: Updater
    reason: str
    view: MatrixView


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
    if wish := find_override(path, len(shape), view, overrides):
        return wish
    return Route(*default_updater(path, shape, view, config, published), view)


def is_broadcast_vector(shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a vector shaped to be broadcast, such as a class token or layer scale."""
    return len(shape) > 2 and max(shape) == math.prod(shape)


def find_override(
    path: str, ndim: int, view: MatrixView, overrides: Overrides | None
) -> Route | None:
    """The route that the first matching override asks for; `view` is the default one."""
    for pattern, wish in (overrides or {}).items():
        if re.search(pattern, path):
            if wish in ("rule", "adam"):
                return Route(wish, f"override {pattern!r}", view)
            return Route("rule", f"override {pattern!r}", as_view(wish, ndim, path))
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


def as_view(wish: Any, ndim: int, path: str) -> MatrixView:
    """A MatrixView from one, or from `optax.contrib.MuonDimensionNumbers`."""
    if hasattr(wish, "reduction_axis") and hasattr(wish, "output_axis"):
        rows, columns = (
            tuple(a + ndim if a < 0 else a for a in ((axes,) if isinstance(axes, int) else axes))
            for axes in (wish.reduction_axis, wish.output_axis)
        )
        batch = tuple(axis for axis in range(ndim) if axis not in (*rows, *columns))
        wish = MatrixView(batch, rows, columns)
    if not isinstance(wish, MatrixView):
        raise ValueError(
            f'{wish!r} for {path} is not "rule", "adam", a MatrixView or MuonDimensionNumbers.'
        )
    try:
        check_view(wish, ndim)
    except ValueError as error:
        raise ValueError(f"override for {path}: {error}") from None
    return wish


def check_overrides(overrides: Overrides | None, paths: list[str]) -> None:
    """Raises a ValueError for a pattern that is no regex or matches none of the paths."""
    for pattern in overrides or {}:
        try:
            matched = any(re.search(pattern, path) for path in paths)
        except re.error as error:
            raise ValueError(
                f"override {pattern!r} is not a regular expression: {error}."
            ) from None
        if not matched:
            some = ", ".join(paths[:5]) + (", …" if len(paths) > 5 else "")
            raise ValueError(f"override {pattern!r} matches no parameter; the paths are {some}")


def default_updater(
    path: str, shape: tuple[int, ...], view: MatrixView, config: RuleConfig, published: bool
) -> tuple[Updater, str]:
    """Who updates a tensor unless somebody asks otherwise, and why."""
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
        return "adam", "output head"
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
