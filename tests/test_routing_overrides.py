"""Wishes of the user about who updates what: regexes, views, Muon's dimension numbers."""

import optax
import pytest

from celo2.routing import MatrixView, as_view, check_overrides, route
from celo2.rule import CELO2


def test_first_override_that_matches_counts():
    view = MatrixView((), (1,), (0,))
    overrides = {r"^a/kernel$": "adam", "kernel": view, "embed": "rule"}
    assert route("a/kernel", (4, 8), CELO2, overrides).updater == "adam"
    assert route("b/kernel", (4, 8), CELO2, overrides) == ("rule", "override 'kernel'", view)
    assert route("embed", (4, 8), CELO2, overrides)[:2] == ("rule", "override 'embed'")
    assert route("other", (4, 8), CELO2, overrides).reason == "matrix"


@pytest.mark.parametrize(
    ("wish", "ndim", "view"),
    [
        (optax.contrib.MuonDimensionNumbers(), 2, MatrixView((), (0,), (1,))),
        (optax.contrib.MuonDimensionNumbers(1, 0), 2, MatrixView((), (1,), (0,))),
        (optax.contrib.MuonDimensionNumbers(-2, -1), 3, MatrixView((0,), (1,), (2,))),
        (optax.contrib.MuonDimensionNumbers((0, 1), (3,)), 4, MatrixView((2,), (0, 1), (3,))),
        (MatrixView((0,), (2,), (1,)), 3, MatrixView((0,), (2,), (1,))),
    ],
)
def test_muon_s_dimension_numbers_are_views(wish, ndim, view):
    assert as_view(wish, ndim, "kernel") == view


@pytest.mark.parametrize(
    ("wish", "ndim", "message"),
    [
        (optax.contrib.MuonDimensionNumbers(0, 2), 2, "a/kernel.* does not fit a tensor of 2 axes"),
        (optax.contrib.MuonDimensionNumbers(0, -3), 2, "does not fit a tensor of 2 axes"),
        (optax.contrib.MuonDimensionNumbers(), 1, "a/kernel.* does not fit a tensor of 1 axes"),
        (optax.contrib.MuonDimensionNumbers(), 0, "does not fit a tensor of 0 axes"),
        (MatrixView((), (0,), (0,)), 2, "a/kernel.* does not fit"),
        ("sgd", 2, '\'sgd\' for a/kernel is not "rule", "adam", a MatrixView or Muon'),
        (None, 2, "None for a/kernel is not"),
    ],
)
def test_wrong_wish_is_refused(wish, ndim, message):
    with pytest.raises(ValueError, match=message):
        route("a/kernel", (4,) * ndim, CELO2, {"kernel": wish})


def test_override_that_matches_nothing_is_refused():
    paths = [f"layer_{i}/kernel" for i in range(9)]
    check_overrides({"layer_3": "adam"}, paths)
    check_overrides(None, paths)
    with pytest.raises(ValueError, match="'conv' matches no parameter; the paths are layer_0.*, …"):
        check_overrides({"layer": "adam", "conv": "rule"}, paths)


def test_override_that_is_no_regex_is_refused():
    with pytest.raises(ValueError, match=r"'\(a' is not a regular expression: missing \)"):
        check_overrides({"(a": "adam"}, ["a"])
