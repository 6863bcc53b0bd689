import numpy as np
import pytest

from celo2.tasks.shrink import area_average, area_weights, shrink
from conftest import data_folder


def test_32_to_8_is_the_block_mean():
    images = np.random.RandomState(0).randint(0, 256, (5, 32, 32)).astype(np.uint8)
    blocks = images.reshape(5, 8, 4, 8, 4).astype(float).mean((2, 4))
    np.testing.assert_array_equal(area_average(images), blocks)


def test_28_to_8_counts_cut_pixels_by_half():
    np.testing.assert_allclose(area_weights(28, 8)[0, :5] * 3.5, [1, 1, 1, 0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(area_weights(28, 8)[1, 2:8] * 3.5, [0, 0.5, 1, 1, 1, 0], rtol=1e-6)


@pytest.mark.parametrize("side", [8, 9, 28, 32])
def test_a_plain_image_keeps_its_level(side):
    np.testing.assert_array_equal(shrink(np.full((2, side, side, 3), 77, np.uint8)), 77)


def test_a_half_is_rounded_up():
    halves = np.zeros((1, 16, 16), np.uint8)
    halves[:, ::2] = 1  # the mean of every 2×2 block is 0.5
    np.testing.assert_array_equal(shrink(halves), 1)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_shrinking_reproduces_the_8x8_files(name):
    folder = data_folder()
    full, small = (
        np.load(folder / f"{name}{suffix}.npz", allow_pickle=False) for suffix in ("", "_8x8")
    )
    expected = small["test_x"]
    if "test_index" in full.files:  # a subset of the whole split
        expected = expected[full["test_index"]]
    np.testing.assert_array_equal(shrink(full["test_x"]), expected)
