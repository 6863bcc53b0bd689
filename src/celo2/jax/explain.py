"""A table of who updates what, and why."""

import math
from pathlib import Path
from typing import NamedTuple

import jax

from celo2.jax.alias import Mask, route_all
from celo2.jax.trees import check_leaves, check_overrides_match, leaf_paths
from celo2.layout import MatrixView
from celo2.routing import Overrides
from celo2.rule import Rule
from celo2.weights import as_rule


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
            seen = _times(line.viewed) if line.updater == "rule" else "-"
            share = f"{line.size / max(total, 1):.1%}"
            rows.append((line.path, _times(line.shape), name, line.reason, seen, share))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        table.insert(1, "  ".join("-" * width for width in widths))
        table.append(f"celo2 updates {self.share('rule'):.1%} of {total:,} parameters.")
        return "\n".join(table)


def explain(
    params,
    *,
    rule: Rule | str | Path = "celo2",
    adam_mask: Mask | None = None,
    overrides: Overrides | None = None,
    published: bool = False,
) -> Explanation:
    """A printable table of who updates each tensor under `celo2` with the same arguments.

    Args:
        params: the parameters, or their shapes as `jax.eval_shape` gives them.
        rule, adam_mask, overrides, published: as for `celo2`.

    Example:
        >>> import jax.numpy as jnp
        >>> from celo2.jax import explain
        >>> table = explain({"embed": jnp.ones((9, 4)), "mlp": jnp.ones((4, 8))})
        >>> [(line.path, line.updater) for line in table]
        [('embed', 'adam'), ('mlp', 'rule')]
    """
    check_leaves(params)
    check_overrides_match(overrides, params)
    routes = route_all(params, as_rule(rule).config, adam_mask, overrides, published)
    return Explanation(
        Line(path, leaf.shape, *route, route.view.shape(leaf.shape), math.prod(leaf.shape))
        for path, leaf, route in zip(
            leaf_paths(params), jax.tree.leaves(params), routes, strict=True
        )
    )


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"
