"""Small image-classification datasets, batches drawn from them on the device, and their tasks."""

import dataclasses
import logging
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from celo2.tasks import networks
from celo2.tasks.datafiles import ENVIRONMENT, array_checksum, data_folder
from celo2.tasks.networks import ConvConfig, ViTConfig
from celo2.tasks.task import Task

IMAGE_SETS = ("mnist", "fashion_mnist", "cifar10", "svhn")
DIGITS = "digits"
CLASSES = 10
ARRAYS = ("train_x", "train_y", "test_x", "test_y")

Size = Literal["8x8", "full"]
FULL_SHAPES = {
    "digits": (8, 8),
    "mnist": (28, 28),
    "fashion_mnist": (28, 28),
    "cifar10": (32, 32, 3),
    "svhn": (32, 32, 3),
}

logger = logging.getLogger(__name__)


class ImageSet(NamedTuple):
    """One dataset on the host: uint8 images [N, H, W] or [N, H, W, 3] and labels [N] below 10."""

    name: str
    source: str  # the file it was read from, or the library that embeds it
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    def checksum(self) -> str:
        """The SHA-256 of the four arrays' bytes."""
        return array_checksum(getattr(self, name) for name in ARRAYS)


def select_images(
    names: str | Sequence[str] | None = None, data: str | os.PathLike | None = None
) -> tuple[ImageSet, ...]:
    """The 8×8 datasets called `names`; for None those in the data folder, else the embedded one.

    The `name` and `source` of each say what was chosen; an automatic choice is also logged.
    """
    if names is None:
        folder = data_folder(data)
        found = tuple(name for name in IMAGE_SETS if (folder / image_file(name, "8x8")).is_file())
        _log_choice(found, str(folder))
        names = found or (DIGITS,)
    names = (names,) if isinstance(names, str) else tuple(names)
    if not names:
        raise ValueError(f"names is empty: name some of {', '.join((*IMAGE_SETS, DIGITS))}.")
    return tuple(load_images(name, data) for name in names)


def load_images(name: str, data: str | os.PathLike | None = None, size: Size = "8x8") -> ImageSet:
    """One dataset, from `<name>_8x8.npz` or `<name>.npz` of the data folder, or the embedded one.

    Args:
        name: one of mnist, fashion_mnist, cifar10, svhn, or digits, which needs no file.
        data: the folder; by default CELO2_DATA, else the cache that `celo2 data fetch` fills.
        size: grey "8x8", or "full" (28×28 grey, 32×32 colour). digits are 8×8 either way.

    >>> load_images("digits").train_x.shape
    (1437, 8, 8)
    """
    if name == DIGITS:
        return _digits()
    if name not in IMAGE_SETS:
        raise ValueError(f"{name!r} is not one of {', '.join((*IMAGE_SETS, DIGITS))}.")
    if size not in ("8x8", "full"):
        raise ValueError(f'size={size!r} is not one of "8x8", "full".')
    path = data_folder(data) / image_file(name, size)
    if not path.is_file():
        raise FileNotFoundError(
            f"{name} needs the file {path.name}, which is not in {path.parent}. Download it with "
            f"`celo2 data fetch{' --full' if size == 'full' else ''}`, or point {ENVIRONMENT} to "
            f"a folder that holds it, or use the embedded dataset {DIGITS!r} (from scikit-learn)."
        )
    return ImageSet(name, str(path), **read_arrays(path, image_shape(name, size)))


def blank_images(name: str, size: Size = "8x8") -> ImageSet:
    """A dataset of one black image of the right shape, to get a model's shapes without data."""
    x, y = np.zeros((1, *image_shape(name, size)), np.uint8), np.zeros(1, np.uint8)
    return ImageSet(name, "nowhere", x, y, x, y)


def image_file(name: str, size: Size) -> str:
    """The name of that dataset's file: `mnist_8x8.npz` or `mnist.npz`."""
    return f"{name}_8x8.npz" if size == "8x8" else f"{name}.npz"


def image_shape(name: str, size: Size) -> tuple[int, ...]:
    """The shape of one image of that dataset and size."""
    return (8, 8) if size == "8x8" else FULL_SHAPES[name]


def read_arrays(path: Path, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The four arrays of an .npz file, checked."""
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is empty, cut off or of another kind")
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            missing = [name for name in ARRAYS if name not in file.files]
            if missing:
                raise ValueError(f"it lacks {', '.join(missing)}")
            arrays = {name: file[name] for name in ARRAYS}
        check_arrays(arrays, shape)
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is not a usable image file: {error}. Delete it and run `celo2 data fetch`."
        ) from error
    return arrays


def check_arrays(arrays: dict[str, np.ndarray], shape: tuple[int, ...]) -> None:
    """Raises a ValueError that names the first array that does not follow the format."""
    for split in ("train", "test"):
        x, y = arrays[f"{split}_x"], arrays[f"{split}_y"]
        for name, array in ((f"{split}_x", x), (f"{split}_y", y)):
            if array.dtype != np.uint8:
                raise ValueError(f"{name} is {array.dtype}, not uint8")
        if x.shape[1:] != shape or x.ndim != len(shape) + 1 or len(x) == 0:
            expected = ", ".join(map(str, shape))
            raise ValueError(f"{split}_x has shape {x.shape}, not (N, {expected}) with N > 0")
        if y.shape != x.shape[:1]:
            raise ValueError(f"{split}_y has shape {y.shape} beside {len(x)} images")
        if y.max() >= CLASSES:
            raise ValueError(f"{split}_y has label {y.max()}, above {CLASSES - 1}")


@cache
def _log_choice(found: tuple[str, ...], folder: str) -> None:
    # Cached, so that each choice is logged once.
    if found:
        logger.info("Using %s from %s.", ", ".join(found), folder)
    else:
        logger.warning(
            "No image datasets in %s: using the embedded %s. `celo2 data fetch` downloads %s.",
            *(folder, DIGITS, ", ".join(IMAGE_SETS)),
        )


@cache
def _digits() -> ImageSet:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            f"The embedded dataset {DIGITS!r} comes with scikit-learn: "
            "`pip install celo2[train]`, or name a dataset of the data folder."
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    # Grey levels 0…16 to 0…255, rounded half up.
    x = np.floor(pixels.reshape(-1, 8, 8) * (255 / 16) + 0.5).astype(np.uint8)
    y = np.asarray(labels, np.uint8)
    # The images come writer by writer; RandomState's stream never changes between versions.
    order = np.random.RandomState(0).permutation(len(x))
    train, test = np.split(order, [int(0.8 * len(x))])
    return ImageSet(DIGITS, "scikit-learn", x[train], y[train], x[test], y[test])


# Several datasets as one array, for problems that each have their own.

# An image's label is in its row, in 16 bytes before the pixels: one gather reads both, and batches
# are drawn 1.8 times as fast on a CPU.
HEAD = 16


class ImageBank(NamedTuple):
    """Several datasets of equal image size in one device array, the shorter ones padded."""

    rows: Array  # uint8 [datasets, most images, HEAD + pixels], the label first
    sizes: Array  # int32 [datasets], the images that count


def image_bank(sets: Sequence[ImageSet]) -> ImageBank:
    """The training images of several datasets as one device array, flattened."""
    images = [s.train_x.reshape(len(s.train_x), -1) for s in sets]
    labels = [s.train_y for s in sets]
    if len({x.shape[1] for x in images}) != 1:
        sizes = ", ".join(f"{s.name} {x.shape[1]}" for s, x in zip(sets, images, strict=True))
        raise ValueError(f"A bank needs images of one size, but the pixels are: {sizes}.")
    rows = np.zeros((len(sets), max(map(len, labels)), HEAD + images[0].shape[1]), np.uint8)
    for i, (x, y) in enumerate(zip(images, labels, strict=True)):
        rows[i, : len(x), HEAD:] = x
        rows[i, : len(y), 0] = y
    return ImageBank(jnp.asarray(rows), jnp.asarray([len(y) for y in labels], jnp.int32))


def sample_batch(
    images: ImageBank, key: Array, dataset: Array | int, batch: int
) -> tuple[Array, Array]:
    """`batch` images of one dataset, with replacement: float32 [B, pixels] in [0, 1], int32 [B].

    Traceable in `key` and `dataset`: vmap over both to give each problem its own dataset.
    """
    drawn = jax.random.randint(key, (batch,), 0, images.sizes[dataset])
    rows = images.rows[dataset, drawn]
    return to_unit(rows[:, HEAD:]), rows[:, 0].astype(jnp.int32)


def to_unit(pixels: Array) -> Array:
    """uint8 pixels as float32 in [0, 1]."""
    return pixels.astype(jnp.float32) * np.float32(1 / 255)


def to_signed(pixels: Array) -> Array:
    """uint8 pixels as float32 in [-1, 1]."""
    return pixels.astype(jnp.float32) * np.float32(2 / 255) - np.float32(1)


# Random crops and flips of training images, the same on the host and on the device.

Area = tuple[float, float]  # smallest and largest part of an image that a crop may take
PAPER_AREA: Area = (0.05, 1.0)
# 5 % of a 32×32 image would be 7×7 pixels, which rarely show what the label says.
SMALL_AREA: Area = (0.25, 1.0)
ASPECT = (3 / 4, 4 / 3)  # width over height
DRAWS = 5  # uniform numbers that make one crop and its flip


class Crop(NamedTuple):
    """A part of an image in fractions of its sides, and whether it is mirrored."""

    left: Any
    top: Any
    width: Any
    height: Any
    flip: Any


def crop_from(draws: Any, area: Area, xp: Any) -> Crop:
    """The crop from `DRAWS` uniform numbers along the first axis; `xp` is numpy or jax.numpy.

    The area is uniform and the aspect ratio log-uniform; a side longer than the image's is cut to
    it. The position is uniform within the image, and half of all crops are mirrored.
    """
    low, high = area
    share = low + (high - low) * draws[0]
    log_low, log_high = map(math.log, ASPECT)
    root = xp.exp(0.5 * (log_low + (log_high - log_low) * draws[1]))  # of the aspect ratio
    width = xp.minimum(xp.sqrt(share) * root, 1.0)
    height = xp.minimum(xp.sqrt(share) / root, 1.0)
    left, top = draws[2] * (1.0 - width), draws[3] * (1.0 - height)
    return Crop(left, top, width, height, draws[4] < 0.5)


def crop_and_flip(images: Array, key: Array, area: Area) -> Array:
    """Random parts of float images [B, H, W, channels], each resized to the whole, half mirrored.

    Two small matrix products an image: cheap beside any model.
    """
    crops = crop_from(jax.random.uniform(key, (DRAWS, len(images))), area, jnp)
    return jax.vmap(_resize_crop)(images, crops)


def _resize_crop(image: Array, crop: Crop) -> Array:
    height, width = image.shape[:2]
    scale = jnp.stack([1.0 / crop.height, 1.0 / crop.width])
    start = jnp.stack([crop.top * height, crop.left * width])
    # Crops are never larger than the image, so nothing needs smoothing before it is resized.
    resized = jax.image.scale_and_translate(
        image, image.shape, (0, 1), scale, -start * scale, "linear", antialias=False
    )
    return jnp.where(crop.flip, resized[:, ::-1], resized)


# Classification tasks.


def classification(
    images: ImageSet,
    init: Callable[[Array], dict],
    logits: Callable[[dict, Array], Array],
    batch: int,
    area: Area | None = None,
) -> Task:
    """Cross-entropy on random batches x [B, H, W, channels] in [0, 1], y [B].

    The dataset's test split is the one for validation. With an `area`, training images are cropped
    and mirrored at random, see `crop_and_flip`.
    """

    def sample(data, key, split):
        x, y = data[split]
        if area is None or split != "train":
            rows = jax.random.randint(key, (batch,), 0, len(y))
            return to_unit(x[rows]), y[rows].astype(jnp.int32)
        rows_key, crop_key = jax.random.split(key)
        rows = jax.random.randint(rows_key, (batch,), 0, len(y))
        return crop_and_flip(to_unit(x[rows]), crop_key, area), y[rows].astype(jnp.int32)

    data = {
        "train": (_with_channels(images.train_x), jnp.asarray(images.train_y)),
        "valid": (_with_channels(images.test_x), jnp.asarray(images.test_y)),
    }
    return Task(init, sample, networks.classification_loss(logits), data)


def image_mlp(
    images: ImageSet, hidden: Sequence[int] = (32,), batch: int = 64, area: Area | None = None
) -> Task:
    """An MLP on flattened pixels."""
    sizes = (images.train_x[0].size, *hidden, CLASSES)
    return classification(
        images, lambda key: networks.init_mlp(key, sizes), networks.mlp_logits, batch, area
    )


def image_convnet(
    images: ImageSet, config: ConvConfig, batch: int = 64, area: Area | None = None
) -> Task:
    """A residual convolution net with as many input channels as the images have."""
    config = dataclasses.replace(config, channels=_channels(images))
    return classification(
        images,
        lambda key: networks.init_convnet(key, config),
        lambda params, x: networks.convnet_logits(params, config, x),
        batch,
        area,
    )


def image_vit(
    images: ImageSet, config: ViTConfig, batch: int = 64, area: Area | None = None
) -> Task:
    """A vision transformer for the images' side and channels."""
    side = images.train_x.shape[1]
    config = dataclasses.replace(config, side=side, channels=_channels(images))
    return classification(
        images,
        lambda key: networks.init_vit(key, config),
        lambda params, x: networks.vit_logits(params, config, x),
        batch,
        area,
    )


def _channels(images: ImageSet) -> int:
    return 1 if images.train_x.ndim == 3 else images.train_x.shape[-1]


def _with_channels(x) -> Array:
    return jnp.asarray(x if x.ndim == 4 else x[..., None])
