"""Batches of images, decoded and augmented on the host while a model trains."""

import os
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import jax
import numpy as np

from celo2.tasks.augment import DRAWS, PAPER_AREA, Crop, crop_from
from celo2.tasks.extra import import_extra
from celo2.tasks.imagefolder import ImageFiles, Record
from celo2.tasks.stream import Part, Split, Stream, closing, rows_of_part

WHOLE = Crop(0.0, 0.0, 1.0, 1.0, False)
CHANNELS = 3
ORDER = 0  # the seed of the validation images' order
AHEAD = 2  # batches decoded before they are needed


def stream(files: ImageFiles, batch: int, side: int) -> Stream:
    """Batches of `files`: x uint8 [B, side, side, 3], y int32 [B].

    Training images come in a new order each epoch, cropped and mirrored at random; validation
    images come whole, in one mixed order that is always the same, so that the first batches are a
    fair sample of all classes.
    """

    def batches(split: Split, seed: int, first: int, part: Part) -> Iterator[Any]:
        rows = rows_of_part(batch, first, part)
        images = _train(files, seed, side) if split == "train" else _valid(files, side)
        return _batches(images[first * batch + part.index :: part.count], rows)

    return Stream(batches, _example(batch, side), files.checksum)


def blank(batch: int, side: int) -> Stream:
    """The shapes of such a stream, without data."""

    def batches(split: Split, seed: int, first: int, part: Part) -> Iterator[Any]:
        raise ValueError("A blank stream has shapes only: make the task with its data.")

    return Stream(batches, _example(batch, side), "")


def decode(record: Record, crop: Crop, side: int) -> np.ndarray:
    """The crop of an image, which is first made square by black margins; uint8 [side, side, 3]."""
    pillow = import_extra("PIL.Image")
    try:
        with pillow.open(BytesIO(record.content)) as opened:
            image = opened.convert("RGB")
    # What Pillow raises for files that are cut off, of another kind, or far too large.
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise ValueError(f"{record.name} is not a readable image: {error}.") from error
    longest = max(image.size)
    square = pillow.new("RGB", (longest, longest))
    square.paste(image, ((longest - image.width) // 2, (longest - image.height) // 2))
    edges = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    # Cropped and resized at once: from the pixels that are there, not from a smaller image.
    box = tuple(min(longest * float(edge), longest) for edge in edges)
    pixels = np.asarray(square.resize((side, side), pillow.Resampling.BILINEAR, box=box))
    return pixels[:, ::-1] if crop.flip else pixels


def _train(files: ImageFiles, seed: int, side: int) -> Any:
    """The training images of all epochs, one after the other, as a grain dataset."""

    def augment(record: Record, rng: np.random.Generator) -> tuple[np.ndarray, np.int32]:
        crop = crop_from(rng.random(DRAWS), PAPER_AREA, np)
        return decode(record, crop, side), np.int32(record.label)

    grain = import_extra("grain")
    order = grain.MapDataset.source(files.train).seed(seed).shuffle().repeat()
    # After repeat and before any cut, so that a crop depends on its place in the run alone.
    return order.random_map(augment)


def _valid(files: ImageFiles, side: int) -> Any:
    """The validation images, again and again."""

    def whole(record: Record) -> tuple[np.ndarray, np.int32]:
        return decode(record, WHOLE, side), np.int32(record.label)

    grain = import_extra("grain")
    order = grain.MapDataset.source(files.valid).seed(ORDER).shuffle()
    return order.repeat(reseed_each_epoch=False).map(whole)


def _batches(images: Any, rows: int) -> Iterator[Any]:
    grain = import_extra("grain")
    threads = os.cpu_count() or 1
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=AHEAD * rows)
    return closing(iter(images.to_iter_dataset(options).batch(rows)))


def _example(batch: int, side: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    x = jax.ShapeDtypeStruct((batch, side, side, CHANNELS), np.uint8)
    return x, jax.ShapeDtypeStruct((batch,), np.int32)
