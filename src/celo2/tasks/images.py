"""Small image-classification datasets, and batches drawn from them on the device."""

import logging
import os
import zipfile
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from celo2.tasks.folder import ENVIRONMENT, checksum, data_folder

NAMES = ("mnist", "fashion_mnist", "cifar10", "svhn")
EMBEDDED = "digits"
CLASSES = 10
# A bank keeps an image's label in its own row, in 16 bytes before the pixels: one visit to memory
# serves both, and batches are drawn 1.8 times as fast on a CPU.
HEAD = 16
ARRAYS = ("train_x", "train_y", "test_x", "test_y")

Size = Literal["8x8", "full"]
FULL_SHAPES = {
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
        return checksum(getattr(self, name) for name in ARRAYS)


class ImageBank(NamedTuple):
    """Several datasets of equal image size in one device array, the shorter ones padded."""

    rows: Array  # uint8 [datasets, most images, HEAD + pixels], the label first
    sizes: Array  # int32 [datasets], the images that count


def select(
    names: str | Sequence[str] | None = None,
    data: str | os.PathLike | None = None,
    size: Size = "8x8",
) -> tuple[ImageSet, ...]:
    """The datasets called `names`; for None or "auto" those of the folder, else the embedded one.

    Each one's `name` and `source` say what was chosen; an automatic choice is logged as well.
    """
    if names is None or names == "auto":
        folder = data_folder(data)
        found = tuple(name for name in NAMES if _path(folder, name, size).is_file())
        _log_choice(found, str(folder))
        names = found or (EMBEDDED,)
    names = (names,) if isinstance(names, str) else tuple(names)
    if not names:
        raise ValueError(f"names is empty: name some of {', '.join((*NAMES, EMBEDDED))}.")
    return tuple(load(name, data, size) for name in names)


def load(name: str, data: str | os.PathLike | None = None, size: Size = "8x8") -> ImageSet:
    """One dataset, from `<name>_8x8.npz` or `<name>.npz` of the data folder, or the embedded one.

    Args:
        name: one of mnist, fashion_mnist, cifar10, svhn, or digits, which needs no file.
        data: the folder; by default CELO2_DATA, else the cache that `celo2 data fetch` fills.
        size: grey "8x8", or "full" (28×28 grey, 32×32 colour). digits are 8×8 either way.

    >>> load("digits").train_x.shape
    (1437, 8, 8)
    """
    if name == EMBEDDED:
        return _digits()
    if name not in NAMES:
        raise ValueError(f"{name!r} is not one of {', '.join((*NAMES, EMBEDDED))}.")
    if size not in ("8x8", "full"):
        raise ValueError(f'size={size!r} is not one of "8x8", "full".')
    path = _path(data_folder(data), name, size)
    if not path.is_file():
        raise FileNotFoundError(
            f"{name} needs the file {path.name}, which is not in {path.parent}. Download it with "
            f"`celo2 data fetch`{' --full' if size == 'full' else ''}, or point {ENVIRONMENT} to "
            f"a folder that holds it, or use the embedded dataset {EMBEDDED!r}."
        )
    return ImageSet(name, str(path), **read_arrays(path, image_shape(name, size)))


def blank(name: str, size: Size = "8x8") -> ImageSet:
    """One black image of that dataset's shape, for a model's shapes without its data."""
    shape = (8, 8) if name == EMBEDDED else image_shape(name, size)
    x, y = np.zeros((1, *shape), np.uint8), np.zeros(1, np.uint8)
    return ImageSet(name, "nowhere", x, y, x, y)


def image_shape(name: str, size: Size) -> tuple[int, ...]:
    """The shape of one image in the file of that dataset and size."""
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
    """Raises a ValueError that says which array is not as the format has it."""
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


def bank(sets: Sequence[ImageSet], split: Literal["train", "test"] = "train") -> ImageBank:
    """One split of several datasets as one device array, images flattened."""
    images = [getattr(s, f"{split}_x").reshape(len(getattr(s, f"{split}_x")), -1) for s in sets]
    labels = [getattr(s, f"{split}_y") for s in sets]
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


def _path(folder: Path, name: str, size: Size) -> Path:
    return folder / (f"{name}_8x8.npz" if size == "8x8" else f"{name}.npz")


@cache
def _log_choice(found: tuple[str, ...], folder: str) -> None:
    # Cached, so that each choice is told once.
    if found:
        logger.info("Using %s from %s.", ", ".join(found), folder)
    else:
        logger.warning(
            "No image datasets in %s: using the embedded %s. `celo2 data fetch` downloads %s.",
            *(folder, EMBEDDED, ", ".join(NAMES)),
        )


@cache
def _digits() -> ImageSet:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            f"The embedded dataset {EMBEDDED!r} comes with scikit-learn: "
            "`pip install celo2[train]`, or name a dataset of the data folder."
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    # Grey levels 0…16 to 0…255, rounded half up.
    x = np.floor(pixels.reshape(-1, 8, 8) * (255 / 16) + 0.5).astype(np.uint8)
    y = np.asarray(labels, np.uint8)
    # The images come writer by writer; RandomState's stream never changes between versions.
    order = np.random.RandomState(0).permutation(len(x))
    train, test = np.split(order, [int(0.8 * len(x))])
    return ImageSet(EMBEDDED, "scikit-learn", x[train], y[train], x[test], y[test])
