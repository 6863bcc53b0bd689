"""ImageNet for the large vision recipe: images on disk, decoded and augmented while a model trains.

The images are in one folder per class, with the same classes in both splits:

    imagenet/train/CLASS/*.jpg
    imagenet/val/CLASS/*.jpg

or are a Hugging Face dataset as `datasets.load_dataset(…).save_to_disk("imagenet")` writes it, with
the splits train and validation and the columns image and label.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from celo2.rulefile import import_extra
from celo2.tasks.datafiles import ENVIRONMENT, data_folder
from celo2.tasks.images import DRAWS, PAPER_AREA, Crop, crop_from, to_signed
from celo2.tasks.networks import ViTConfig, classification_loss, init_vit, vit_logits
from celo2.tasks.task import Part, Split, Stream, Task, read_batches

NAME = "imagenet"
HUB_NAME = "ILSVRC/imagenet-1k"
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
SAVED = "dataset_dict.json"  # what save_to_disk writes
WHOLE = Crop(0.0, 0.0, 1.0, 1.0, False)
ORDER = 0  # the seed of the validation images' order
AHEAD = 2  # batches decoded before they are needed


class Record(NamedTuple):
    """One image as its file has it; `name` is for errors."""

    name: str
    content: bytes
    label: int


class ImageFiles(NamedTuple):
    """A dataset on disk: grain datasets of Records."""

    train: Any
    valid: Any
    classes: int
    checksum: str  # SHA-256 of the files' names and sizes: their content may be 150 GB


def load_image_files(data: str | os.PathLike | None = None) -> ImageFiles:
    """The dataset in the folder `imagenet` of the data folder.

    Args:
        data: the data folder; by default CELO2_DATA, else the cache folder.
    """
    root = data_folder(data) / NAME
    if (root / SAVED).is_file():
        return _load_saved(root)
    if not all((root / half).is_dir() for half in ("train", "val")):
        raise FileNotFoundError(
            f"There are no images in {root}: it should have the folders train/CLASS and val/CLASS "
            f"with image files, or be a Hugging Face dataset, made with datasets.load_dataset("
            f"{HUB_NAME!r}).save_to_disk({str(root)!r}) after accepting its terms at "
            f"https://huggingface.co/datasets/{HUB_NAME}. {ENVIRONMENT} names the folder that "
            f"holds {NAME}."
        )
    return _load_folders(root)


def blank_image_files(classes: int) -> ImageFiles:
    """A dataset without images, to get a model's shapes without data."""
    return ImageFiles((), (), classes, "")


def _load_folders(root: Path) -> ImageFiles:
    names = {half: _subfolders(root / half) for half in ("train", "val")}
    if names["train"] != names["val"]:
        odd = sorted(set(names["train"]) ^ set(names["val"]))
        raise ValueError(
            f"{root}/train has {len(names['train'])} class folders and {root}/val "
            f"{len(names['val'])}; in one only: {', '.join(odd[:5])}. Images belong in one "
            "folder per class, with the same names in both."
        )
    digest = hashlib.sha256()
    train, valid = (_list_images(root / half, names[half], digest) for half in ("train", "val"))
    return ImageFiles(train, valid, len(names["train"]), digest.hexdigest())


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        found = sorted(entry.name for entry in entries if entry.is_dir())
    if not found:
        raise ValueError(
            f"{folder} has no class folders: sort its images into one folder per class."
        )
    return found


def _list_images(folder: Path, classes: Sequence[str], digest: Any) -> Any:
    """The split's images by class and name; the digest is updated with their names and sizes."""
    files: list[tuple[str, int]] = []
    for label, name in enumerate(classes):
        with os.scandir(folder / name) as entries:
            found = [e for e in entries if e.name.lower().endswith(SUFFIXES)]
        if not found:
            raise ValueError(f"{folder / name} has no image files ({', '.join(SUFFIXES)}).")
        for entry in sorted(found, key=lambda e: e.name):
            files.append((f"{name}/{entry.name}", label))
            digest.update(f"{folder.name}/{name}/{entry.name} {entry.stat().st_size}\n".encode())

    def read(file: tuple[str, int]) -> Record:
        path = folder / file[0]
        return Record(str(path), path.read_bytes(), file[1])

    return import_extra("grain", "data").MapDataset.source(files).map(read)


def _load_saved(root: Path) -> ImageFiles:
    saved = import_extra("datasets", "data").load_from_disk(str(root))
    train, valid = (_read_saved(root, saved, name) for name in ("train", "validation"))
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.arrow")):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
    classes = saved["train"].features["label"].num_classes
    return ImageFiles(train, valid, classes, digest.hexdigest())


def _read_saved(root: Path, saved: Any, split: str) -> Any:
    columns = saved[split].features if split in saved else ()
    if missing := [column for column in ("image", "label") if column not in columns]:
        raise ValueError(f"The dataset in {root} has no {', '.join(missing)} in {split}.")
    rows = saved[split].cast_column("image", import_extra("datasets", "data").Image(decode=False))

    def read(index: int) -> Record:
        row = rows[index]
        content = row["image"]["bytes"] or Path(row["image"]["path"]).read_bytes()
        return Record(f"{root}/{split}, row {index}", content, row["label"])

    return import_extra("grain", "data").MapDataset.range(len(rows)).map(read)


def image_stream(files: ImageFiles, batch: int, side: int) -> Stream:
    """Batches of `files`: x uint8 [B, side, side, 3], y int32 [B].

    Training images come in a new order each epoch, cropped and mirrored at random; validation
    images come whole, in one mixed order that is always the same, so that the first batches are a
    fair sample of all classes.
    """

    def augment(record: Record, rng: np.random.Generator) -> tuple[np.ndarray, np.int32]:
        crop = crop_from(rng.random(DRAWS), PAPER_AREA, np)
        return decode_image(record, crop, side), np.int32(record.label)

    def show_whole(record: Record) -> tuple[np.ndarray, np.int32]:
        return decode_image(record, WHOLE, side), np.int32(record.label)

    def batches(split: Split, seed: int, first: int, part: Part) -> Iterator[Any]:
        if not files.checksum:
            raise ValueError("Blank images have shapes only: make the task with its data.")
        if split == "train":
            order = files.train.seed(seed).shuffle().repeat()
            # After repeat and before any cut, so that a crop depends on its place in the run alone.
            images = order.random_map(augment)
        else:
            order = files.valid.seed(ORDER).shuffle()
            images = order.repeat(reseed_each_epoch=False).map(show_whole)
        threads = os.cpu_count() or 1
        return read_batches(images, batch, first, part, threads=threads, ahead=AHEAD)

    x = jax.ShapeDtypeStruct((batch, side, side, 3), np.uint8)
    return Stream(batches, (x, jax.ShapeDtypeStruct((batch,), np.int32)), files.checksum)


def decode_image(record: Record, crop: Crop, side: int) -> np.ndarray:
    """The crop of an image, which is first made square by black margins; uint8 [side, side, 3]."""
    pillow = import_extra("PIL.Image", "data")
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


def streamed_vit(images: Stream, config: ViTConfig) -> Task:
    """A vision transformer on batches from the host: x uint8 [B, side, side, channels], y [B].

    Pixels are sent as bytes, a quarter of the size of float32, and scaled to [-1, 1] on the device.
    """

    def logits(params, x):
        dtype = params["patch_embed"]["kernel"].dtype
        return vit_logits(params, config, to_signed(x).astype(dtype))

    return Task(
        lambda key: init_vit(key, config),
        lambda batch, key, split: batch,
        classification_loss(logits),
        images,
    )
