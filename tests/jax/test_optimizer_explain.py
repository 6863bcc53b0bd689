"""The table of who updates what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from celo2.jax import celo2, explain
from celo2.jax.optimizer import leaf_paths
from celo2.routing import MatrixView
from celo2.rule import CELO2_BASE
from rules import make_rule

RULE = make_rule()
PARAMS = {
    "embed": {"table": jnp.ones((10, 4))},
    "conv": {"kernel": jnp.ones((3, 3, 2, 4)), "bias": jnp.ones(4)},
    "attention": {"query": jnp.ones((4, 2, 2))},
    "temperature": jnp.ones(()),
}


def test_table_tells_path_shape_updater_reason_view_and_share():
    table = explain(PARAMS, rule=RULE)
    lines = {line.path: line for line in table}
    assert list(lines) == [
        "attention/query",
        "conv/bias",
        "conv/kernel",
        "embed/table",
        "temperature",
    ]
    kernel = lines["conv/kernel"]
    assert kernel[:4] == ("conv/kernel", (3, 3, 2, 4), "rule", "matrix")
    assert kernel.view == MatrixView((), (0, 1, 2), (3,)) and kernel.viewed == (18, 4)
    assert lines["attention/query"].viewed == (4, 4)
    reasons = [lines[path].reason for path in ("conv/bias", "embed/table", "temperature")]
    assert reasons == ["vector", "embedding", "single element"]
    assert sum(line.size for line in table) == 133
    assert table.share("rule") == pytest.approx(88 / 133)
    assert table.share("rule") + table.share("adam") == pytest.approx(1)


def test_printed_table_is_aligned_and_complete():
    header, rule, *rows, last = str(explain(PARAMS, rule=RULE)).splitlines()
    assert header.split("  ")[0].strip() == "path" and set(rule) == {"-", " "}
    columns = [header.index(name) for name in ("shape", "updated by", "because", "seen as")]
    for row in rows:
        assert all(row[column - 2 : column] == "  " and row[column] != " " for column in columns)
    text = {row.split()[0]: row.split() for row in rows}
    assert text["conv/kernel"] == ["conv/kernel", "3×3×2×4", "celo2", "matrix", "18×4", "54.1%"]
    assert text["embed/table"] == ["embed/table", "10×4", "AdamW", "embedding", "-", "30.1%"]
    assert text["temperature"][1] == "scalar"
    assert last == "celo2 updates 66.2% of 133 parameters."


def test_shapes_are_enough():
    shapes = jax.eval_shape(lambda: PARAMS)
    assert explain(shapes, rule=RULE) == explain(PARAMS, rule=RULE)


def test_base_updates_everything_but_single_elements():
    table = explain(PARAMS, rule=make_rule(CELO2_BASE))
    assert [line.path for line in table if line.updater == "adam"] == ["temperature"]


def test_mask_and_overrides_are_shown_with_their_reason():
    mask = jax.tree.map(lambda x: x.ndim < 2, PARAMS)
    table = {line.path: line for line in explain(PARAMS, rule=RULE, adam_mask=mask)}
    assert table["embed/table"][2:4] == ("rule", "adam_mask")
    assert explain(PARAMS, rule=RULE, adam_mask=lambda _: mask) == list(table.values())

    (line,) = explain({"w": jnp.ones((4, 8))}, rule=RULE, overrides={"^w$": "adam"})
    assert line[2:4] == ("adam", "override '^w$'")


def test_mask_may_be_a_prefix_of_the_tree():
    mask = {"embed": False, "conv": True, "attention": {"query": False}, "temperature": True}
    table = {line.path: line.updater for line in explain(PARAMS, rule=RULE, adam_mask=mask)}
    assert table["conv/kernel"] == table["conv/bias"] == "adam"
    assert table["embed/table"] == table["attention/query"] == "rule"


@pytest.mark.parametrize(
    "options", [{}, {"overrides": {"embed": "rule", "conv": "adam"}}, {"published": True}]
)
def test_table_says_what_celo2_does(options):
    state = celo2(1e-3, rule=RULE, **options).init(PARAMS)
    moved = set(leaf_paths(state.inner_states["rule"].inner_state[0].rms))
    shown = {line.path for line in explain(PARAMS, rule=RULE, **options) if line.updater == "rule"}
    assert moved == shown


def test_empty_tree_has_an_empty_table():
    assert str(explain({}, rule=RULE)).endswith("celo2 updates 0.0% of 0 parameters.")


def test_wrong_override_and_wrong_leaf_are_refused():
    with pytest.raises(ValueError, match="'decoder' matches no parameter"):
        explain(PARAMS, rule=RULE, overrides={"decoder": "adam"})
    with pytest.raises(TypeError, match="steps is int64"):
        explain({"steps": np.arange(3)}, rule=RULE)
