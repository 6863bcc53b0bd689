"""Matrix views and factored axes."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
import reference_parts
from celo2.jax.optimizer import from_view, to_view
from celo2.routing import MatrixView, check_view, default_view, factored_axes, published_view


@pytest.mark.parametrize(
    ("stored", "default", "published"),
    [
        ((), (1, 1), (1, 1)),
        ((7,), (1, 7), (1, 7)),
        ((4, 6), (4, 6), (4, 6)),
        ((2, 4, 6), (2, 4, 6), (2, 4, 6)),
        ((3, 3, 4, 8), (36, 8), (3, 3, 4, 8)),
        ((2, 3, 3, 4, 8), (72, 8), (2, 3, 3, 4, 8)),
    ],
)
def test_views_of_a_kernel(stored, default, published):
    assert default_view(len(stored)).shape(stored) == default
    assert published_view(len(stored)).shape(stored) == published


@pytest.mark.parametrize(
    ("shape", "axes", "published"),
    [
        ((5, 3), (-1, -2), (-1, -2)),
        ((3, 5), (-2, -1), (-2, -1)),
        ((4, 4), (-2, -1), (-2, -1)),
        ((1, 9), (-2, -1), (-2, -1)),
        ((9, 5, 3), (-1, -2), (-2, -3)),
        ((2, 6, 10), (-2, -1), (-2, -1)),
        ((3, 3, 3), (-2, -1), (-2, -1)),
        ((8, 3, 3, 8), (-2, -1), (-4, -1)),
    ],
)
def test_factored_axes_are_the_two_largest(shape, axes, published):
    assert factored_axes(shape) == axes
    assert factored_axes(shape, published=True) == published


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.booleans())
def test_factored_axes_equal_the_reference_s(shape, published):
    ours = factored_axes(tuple(shape), published)
    assert tuple(axis + len(shape) for axis in ours) == reference.factored_axes(shape, published)


@st.composite
def views(draw):
    """A stored shape and some view of it."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    i, j = sorted((draw(st.integers(0, len(shape))), draw(st.integers(0, len(shape)))))
    return shape, MatrixView(tuple(order[:i]), tuple(order[i:j]), tuple(order[j:]))


@given(views())
def test_from_view_undoes_to_view(drawn):
    shape, view = drawn
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    viewed = to_view(jnp.asarray(x), view)
    assert viewed.shape == view.shape(shape)
    if not view.is_vector:
        np.testing.assert_array_equal(viewed, reference_parts.view(x, view))
    np.testing.assert_array_equal(from_view(viewed, view, shape), x)


def test_vector_is_a_single_row():
    assert MatrixView((0,), (), (1,)).is_vector
    assert MatrixView((0,), (), (1,)).shape((3, 7)) == (3, 1, 7)
    assert default_view(1).is_vector and not default_view(2).is_vector


@pytest.mark.parametrize(
    "view",
    [
        MatrixView((), (0,), (1,)),
        MatrixView((0,), (0,), (1, 2)),
        MatrixView((), (0, 1), (3,)),
        MatrixView((), (0, 1), (-1,)),
    ],
)
def test_view_must_name_every_axis_once(view):
    with pytest.raises(ValueError, match="tensor of 3 axes.* name each of 0…2 once"):
        check_view(view, 3)
    check_view(MatrixView((1,), (2,), (0,)), 3)
