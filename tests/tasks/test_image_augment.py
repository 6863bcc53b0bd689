import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from celo2.tasks import augment, images
from celo2.tasks.classify import image_mlp

UNIT = st.floats(0.0, 1.0, width=32)
PIXELS = jnp.arange(64.0).reshape(1, 8, 8, 1) / 64


@given(arrays.arrays(np.float32, augment.DRAWS, elements=UNIT))
@pytest.mark.parametrize("area", [augment.PAPER_AREA, augment.SMALL_AREA])
def test_crop_is_inside_the_image_and_of_the_area_and_aspect_asked_for(area, draws):
    crop = augment.crop_from(draws, area, np)
    for start, length in ((crop.left, crop.width), (crop.top, crop.height)):
        assert 0 <= start and 0 < length <= 1 and start + length <= 1 + 1e-6
    assert crop.width * crop.height <= area[1] + 1e-6
    if crop.width < 1 and crop.height < 1:
        assert crop.width * crop.height >= area[0] - 1e-6
        assert 0.75 - 1e-5 <= crop.width / crop.height <= 4 / 3 + 1e-5


def test_host_and_device_draw_the_same_crop():
    draws = np.random.default_rng(0).random((augment.DRAWS, 100)).astype(np.float32)
    ours, theirs = (augment.crop_from(x, (0.05, 1.0), xp) for x, xp in ((draws, np), (draws, jnp)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


def resize(left, top, width, height, flip=False):
    crop = augment.Crop(*map(jnp.float32, (left, top, width, height)), jnp.bool_(flip))
    return np.asarray(jax.jit(augment._resize)(PIXELS[0], crop))[..., 0]


def test_whole_crop_is_the_image_and_a_flip_its_mirror_image():
    image = np.asarray(PIXELS[0, ..., 0])
    np.testing.assert_allclose(resize(0, 0, 1, 1), image, atol=1e-6)
    np.testing.assert_allclose(resize(0, 0, 1, 1, flip=True), image[:, ::-1], atol=1e-6)


def test_crop_shows_its_part():
    part = resize(0.5, 0.25, 0.5, 0.5)  # columns 4 to 7, rows 2 to 5
    assert part.min() >= float(PIXELS[0, 1, 3, 0]) and part.max() <= float(PIXELS[0, 6, 7, 0])
    # A linear ramp stays one between the pixels' centres.
    np.testing.assert_allclose(np.diff(part[:, 3]), 4 / 64, atol=1e-6)
    np.testing.assert_allclose(np.diff(part[3])[:-1], 0.5 / 64, atol=1e-6)


def test_each_image_gets_its_own_crop_within_the_range_of_its_pixels(strict_dtypes):
    batch = jnp.tile(PIXELS, (16, 1, 1, 1))
    run = jax.jit(lambda x, key: augment.crop_and_flip(x, key, augment.PAPER_AREA))
    cut = np.asarray(run(batch, jax.random.key(0)))
    assert cut.shape == batch.shape and cut.dtype == np.float32
    assert cut.min() >= 0 and cut.max() <= 63 / 64 + 1e-6
    assert len({image.tobytes() for image in cut}) == 16


def test_only_training_batches_are_augmented():
    x = np.random.default_rng(0).integers(0, 256, (9, 8, 8)).astype(np.uint8)
    y = np.arange(9, dtype=np.uint8)
    made = [
        image_mlp(images.ImageSet("a", "test", x, y, x, y), batch=4, area=area)
        for area in (None, augment.SMALL_AREA)
    ]
    key, sample = jax.random.key(0), jax.jit(made[1].sample, static_argnums=2)
    plain = made[0].sample(made[0].data, key, "valid")
    jax.tree.map(np.testing.assert_array_equal, plain, sample(made[1].data, key, "valid"))
    cropped_x, labels = sample(made[1].data, key, "train")
    assert not np.isclose(cropped_x[..., 0], x[np.asarray(labels)] / 255).all(axis=(1, 2)).any()
