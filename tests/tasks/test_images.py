import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as numpy_arrays

from celo2.tasks import images
from conftest import SAMPLES

UNIT = st.floats(0.0, 1.0, width=32)
PIXELS = jnp.arange(64.0).reshape(1, 8, 8, 1) / 64
DIGITS_SHA256 = "b678268270c88df34a8b30552451a287ae8abb818f4c4ebd27201ef0f2093173"

FASHION_SHA256 = "68e03beb1728a37f4b29324962876e4c5c2bb41ca2a5a8c7e37750dd367358a0"


@pytest.fixture(autouse=True)
def no_files(monkeypatch, tmp_path):
    """An empty cache and no named folder, whatever this machine has."""
    monkeypatch.delenv("CELO2_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images._log_choice.cache_clear()


def arrays(count=20, shape=(8, 8), seed=0):
    rng = np.random.RandomState(seed)
    return {
        "train_x": rng.randint(0, 256, (count, *shape)).astype(np.uint8),
        "train_y": rng.randint(0, 10, count).astype(np.uint8),
        "test_x": rng.randint(0, 256, (count // 2, *shape)).astype(np.uint8),
        "test_y": rng.randint(0, 10, count // 2).astype(np.uint8),
    }


def write(folder, name="mnist_8x8", **changes):
    np.savez(folder / f"{name}.npz", **(arrays() | changes))


def test_digits_use_the_whole_grey_range_and_split_four_to_one():
    digits = images.load_images("digits")
    assert (len(digits.train_x), len(digits.test_x)) == (1437, 360)
    assert digits.train_x.min() == 0 and digits.train_x.max() == 255
    assert np.bincount(digits.test_y).min() >= 20  # the split is mixed, not by writer or class


def test_digits_checksum_is_fixed():
    # A change here makes earlier records incomparable.
    assert images.load_images("digits").checksum() == DIGITS_SHA256


def test_nothing_there_means_digits_and_says_so_once(caplog):
    with caplog.at_level(logging.INFO):
        chosen = [images.select_images()[0].name for _ in range(2)]
    assert chosen == ["digits", "digits"]
    assert len(caplog.records) == 1 and "celo2 data fetch" in caplog.text


def test_automatic_choice_takes_what_the_folder_has(tmp_path):
    write(tmp_path, "mnist_8x8")
    write(tmp_path, "svhn_8x8")
    chosen = images.select_images(None, tmp_path)
    assert [c.name for c in chosen] == ["mnist", "svhn"]
    assert chosen[0].source == str(tmp_path / "mnist_8x8.npz")


def test_environment_names_the_folder_and_the_argument_wins(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    monkeypatch.setenv("CELO2_DATA", str(tmp_path / "a"))
    assert images.load_images("mnist").source == str(tmp_path / "a" / "mnist_8x8.npz")
    assert images.load_images("mnist", tmp_path / "b").source == str(
        tmp_path / "b" / "mnist_8x8.npz"
    )


def test_absent_dataset_error_names_the_folder_and_the_ways_out(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        images.load_images("mnist")
    for part in (str(tmp_path / "cache" / "celo2" / "data"), "celo2 data fetch", "digits"):
        assert part in str(error.value)
    with pytest.raises(FileNotFoundError, match="`celo2 data fetch --full`"):
        images.load_images("mnist", size="full")


def test_named_folder_must_exist(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="data=.*nowhere"):
        images.select_images(None, tmp_path / "nowhere")
    monkeypatch.setenv("CELO2_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="CELO2_DATA=.*nowhere"):
        images.select_images()


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'mnits' is not one of mnist"):
        images.load_images("mnits")
    with pytest.raises(ValueError, match="names is empty"):
        images.select_images(())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_x": np.zeros((20, 8, 8), np.float32)}, "train_x is float32, not uint8"),
        ({"train_x": np.zeros((20, 28, 28), np.uint8)}, r"train_x has shape \(20, 28, 28\)"),
        ({"train_x": np.zeros(20, np.uint8)}, r"train_x has shape \(20,\)"),
        ({"test_y": np.zeros(3, np.uint8)}, r"test_y has shape \(3,\) beside 10 images"),
        ({"train_y": np.full(20, 10, np.uint8)}, "train_y has label 10"),
        ({"train_x": np.zeros((0, 8, 8), np.uint8)}, "N > 0"),
        ({"train_y": np.array([None] * 20)}, "allow_pickle=False"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path, changes, message):
    write(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        images.load_images("mnist", tmp_path)


def test_missing_array_is_named(tmp_path):
    np.savez(tmp_path / "mnist_8x8.npz", train_x=arrays()["train_x"])
    with pytest.raises(ValueError, match="it lacks train_y, test_x, test_y"):
        images.load_images("mnist", tmp_path)


@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_file_is_refused(tmp_path, compressed):
    path = tmp_path / "mnist_8x8.npz"
    (np.savez_compressed if compressed else np.savez)(path, **arrays())
    good = path.read_bytes()
    middle = len(good) // 4
    flipped = good[:middle] + bytes([good[middle] ^ 255]) + good[middle + 1 :]
    for damaged in (b"", good[:100], good[:-100], flipped):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a usable image file"):
            images.load_images("mnist", tmp_path)


def test_full_size_has_its_own_file_and_shape(tmp_path):
    write(tmp_path, "cifar10", **arrays(shape=(32, 32, 3)))
    assert images.load_images("cifar10", tmp_path, "full").train_x.shape == (20, 32, 32, 3)
    with pytest.raises(FileNotFoundError, match="cifar10_8x8.npz"):
        images.load_images("cifar10", tmp_path)


def test_checksum_sees_a_single_pixel(tmp_path):
    write(tmp_path)
    loaded = images.load_images("mnist", tmp_path)
    before = loaded.checksum()
    loaded.test_x[3, 4, 5] ^= 1
    assert loaded.checksum() != before


def marked_set(name, count, level):
    """A dataset whose pixels and labels all carry its level, so that a mix-up shows."""
    x, y = np.full((count, 8, 8), level, np.uint8), np.full(count, level // 51, np.uint8)
    return images.ImageSet(name, "test", x, y, x, y)


def test_bank_serves_each_problem_its_own_dataset_without_padding(strict_dtypes):
    bank = images.image_bank(
        [marked_set("a", 7, 51), marked_set("b", 100, 102), marked_set("c", 3, 255)]
    )
    assert bank.rows.dtype == np.uint8 and bank.rows.shape == (3, 100, images.HEAD + 64)
    index = np.array([2, 0, 1, 0], np.int32)
    keys = jax.random.split(jax.random.key(0), 4)
    sample = jax.vmap(images.sample_batch, in_axes=(None, 0, 0, None))
    x, y = jax.jit(sample, static_argnums=3)(bank, keys, index, 64)
    assert x.shape == (4, 64, 64) and x.dtype == np.float32 and y.dtype == np.int32
    # Padding is 0 and would show as a level of its own.
    for problem, level in enumerate([1.0, 0.2, 0.4, 0.2]):
        np.testing.assert_allclose(x[problem], level, rtol=1e-6)
        np.testing.assert_array_equal(y[problem], round(level * 5))


def test_sampling_reaches_every_image_and_keeps_its_label():
    x = np.arange(10, dtype=np.uint8)[:, None, None] * np.ones((1, 8, 8), np.uint8)
    y = np.arange(10, dtype=np.uint8)
    bank = images.image_bank([images.ImageSet("a", "test", x, y, x, y), marked_set("b", 40, 51)])
    sample = jax.jit(images.sample_batch, static_argnums=(2, 3))
    x, y = sample(bank, jax.random.key(0), 0, 500)
    assert set(np.asarray(y)) == set(range(10))
    np.testing.assert_allclose(x[:, 0] * 255, y, rtol=1e-5)


def test_bank_refuses_images_of_two_sizes(tmp_path):
    write(tmp_path, "mnist", **arrays(shape=(28, 28)))
    with pytest.raises(ValueError, match="digits 64, mnist 784"):
        images.image_bank(
            [images.load_images("digits"), images.load_images("mnist", tmp_path, "full")]
        )


def test_real_images_load_in_both_sizes():
    small, full = (images.load_images("fashion_mnist", SAMPLES, size) for size in ("8x8", "full"))
    assert (small.train_x.shape, full.test_x.shape) == ((12, 8, 8), (6, 28, 28))
    np.testing.assert_array_equal(small.test_y, [9, 2, 1, 1, 6, 1])
    assert full.checksum() == FASHION_SHA256
    bank = images.image_bank([small, images.load_images("digits")])
    assert bank.rows.shape == (2, 1437, images.HEAD + 64)
    np.testing.assert_array_equal(bank.rows[0, 11, images.HEAD :], small.train_x[11].ravel())


@given(numpy_arrays(np.float32, images.DRAWS, elements=UNIT))
@pytest.mark.parametrize("area", [images.PAPER_AREA, images.SMALL_AREA])
def test_crop_is_inside_the_image_and_of_the_area_and_aspect_asked_for(area, draws):
    crop = images.crop_from(draws, area, np)
    for start, length in ((crop.left, crop.width), (crop.top, crop.height)):
        assert 0 <= start and 0 < length <= 1 and start + length <= 1 + 1e-6
    assert crop.width * crop.height <= area[1] + 1e-6
    if crop.width < 1 and crop.height < 1:
        assert crop.width * crop.height >= area[0] - 1e-6
        assert 0.75 - 1e-5 <= crop.width / crop.height <= 4 / 3 + 1e-5


def test_host_and_device_draw_the_same_crop():
    draws = np.random.default_rng(0).random((images.DRAWS, 100)).astype(np.float32)
    ours, theirs = (images.crop_from(x, (0.05, 1.0), xp) for x, xp in ((draws, np), (draws, jnp)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


def resize(left, top, width, height, flip=False):
    crop = images.Crop(*map(jnp.float32, (left, top, width, height)), jnp.bool_(flip))
    return np.asarray(jax.jit(images._resize_crop)(PIXELS[0], crop))[..., 0]


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
    run = jax.jit(lambda x, key: images.crop_and_flip(x, key, images.PAPER_AREA))
    cut = np.asarray(run(batch, jax.random.key(0)))
    assert cut.shape == batch.shape and cut.dtype == np.float32
    assert cut.min() >= 0 and cut.max() <= 63 / 64 + 1e-6
    assert len({image.tobytes() for image in cut}) == 16


def test_only_training_batches_are_augmented():
    x = np.random.default_rng(0).integers(0, 256, (9, 8, 8)).astype(np.uint8)
    y = np.arange(9, dtype=np.uint8)
    made = [
        images.image_mlp(images.ImageSet("a", "test", x, y, x, y), batch=4, area=area)
        for area in (None, images.SMALL_AREA)
    ]
    plain, sample = (jax.jit(task.sample, static_argnums=2) for task in made)
    key = jax.random.key(0)
    plain = plain(made[0].data, key, "valid")
    jax.tree.map(np.testing.assert_array_equal, plain, sample(made[1].data, key, "valid"))
    cropped_x, labels = sample(made[1].data, key, "train")
    assert not np.isclose(cropped_x[..., 0], x[np.asarray(labels)] / 255).all(axis=(1, 2)).any()
