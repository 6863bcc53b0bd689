"""The reference where gradients are zero, missing or not finite."""

import numpy as np
import pytest

import reference
from celo2.rule import CELO2
from test_reference import PUBLISHED, problem, run


def test_tensor_without_gradient_holds_still_until_it_has_one():
    weights, params, grads = problem((5, 3))
    grads[:2] = 0
    held, moments = run(CELO2, weights, params, grads)
    drifting, published_moments = run(CELO2, weights, params, grads, **PUBLISHED)
    assert not held[:2].any() and drifting[0].any()
    np.testing.assert_array_equal(held[2:], drifting[2:])
    assert moments.moved == 2 and published_moments.moved == 4


def test_tensor_moves_on_a_later_zero_gradient():
    weights, params, grads = problem((5, 3))
    grads[1] = 0
    updates, _ = run(CELO2, weights, params, grads)
    assert updates[1].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_gradient_leaves_slice_and_statistics_unchanged(bad):
    weights, params, grads = problem((2, 4, 3))
    before = run(CELO2, weights, params[:3], grads[:3])[1]
    grads[3, 1, 2, 0] = bad
    update, after = reference.step(CELO2, weights, params[3], grads[3], before)
    assert update[0].any() and not update[1].any()
    for name in ("momentum", "rows", "cols"):
        for x, y in zip(getattr(before, name), getattr(after, name), strict=True):
            assert not np.array_equal(x[0], y[0]), name
            np.testing.assert_array_equal(x[1], y[1], err_msg=name)
    np.testing.assert_array_equal(before.rms[1], after.rms[1])
    assert list(after.moved) == [4, 3]


def test_published_layout_skips_the_whole_tensor():
    weights, params, grads = problem((2, 4, 3))
    grads[3, 1, 2, 0] = np.nan
    updates, moments = run(CELO2, weights, params, grads, published=True)
    assert updates[2].any() and not updates[3].any()
    assert list(moments.moved) == [3, 3]


def test_infinite_gradient_is_clipped_in_published_behaviour():
    weights, params, grads = problem((4, 3))
    grads[1, 0, 0] = np.inf
    infinite, _ = run(CELO2, weights, params, grads, **PUBLISHED)
    grads[1, 0, 0] = 1000
    clipped, _ = run(CELO2, weights, params, grads, **PUBLISHED)
    np.testing.assert_array_equal(infinite, clipped)
