"""ImageNet for the large vision recipe: images on disk, decoded and augmented while a model trains.

The images are laid out in a folder for each class, with the same classes in both halves:

    imagenet/train/CLASS/*.jpg
    imagenet/val/CLASS/*.jpg

or are a Hugging Face dataset as `datasets.load_dataset(…).save_to_disk("imagenet")` writes it, with
the splits train and validation and the columns image and label.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from celo2.tasks.datafiles import ENVIRONMENT, data_folder, import_extra
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


class Records(Protocol):
    """One split of a dataset, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...


class ImageFiles(NamedTuple):
    """A dataset on disk."""

    train: Records
    valid: Records
    classes: int
    checksum: str  # SHA-256 of the files' names and sizes: their content may be 150 GB


@dataclass(frozen=True, eq=False)
class FolderSplit:
    """The images below a folder, sorted by class and name."""

    root: Path
    files: Sequence[str]  # CLASS/NAME
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Record:
        path = self.root / self.files[index]
        return Record(str(path), path.read_bytes(), int(self.labels[index]))


@dataclass(frozen=True, eq=False)
class SavedSplit:
    """A split of a saved Hugging Face dataset."""

    name: str
    rows: Any

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        row = self.rows[int(index)]
        content = row["image"]["bytes"] or Path(row["image"]["path"]).read_bytes()
        return Record(f"{self.name}, row {index}", content, row["label"])


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


def _load_folders(root: Path) -> ImageFiles:
    names = {half: _subfolders(root / half) for half in ("train", "val")}
    if names["train"] != names["val"]:
        odd = sorted(set(names["train"]) ^ set(names["val"]))
        raise ValueError(
            f"{root}/train has {len(names['train'])} class folders and {root}/val "
            f"{len(names['val'])}; in one only: {', '.join(odd[:5])}. Images belong into one "
            "folder for each class, of the same name in both."
        )
    digest = hashlib.sha256()
    train, valid = (_list_images(root / half, names[half], digest) for half in ("train", "val"))
    return ImageFiles(train, valid, len(names["train"]), digest.hexdigest())


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        found = sorted(entry.name for entry in entries if entry.is_dir())
    if not found:
        raise ValueError(f"{folder} has no class folders: sort its images into one for each class.")
    return found


def _list_images(folder: Path, classes: Sequence[str], digest: Any) -> FolderSplit:
    """The split's files; each one's name and size go into the digest."""
    files, labels = [], []
    for label, name in enumerate(classes):
        with os.scandir(folder / name) as entries:
            found = [e for e in entries if e.name.lower().endswith(SUFFIXES)]
        if not found:
            raise ValueError(f"{folder / name} has no image files ({', '.join(SUFFIXES)}).")
        for entry in sorted(found, key=lambda e: e.name):
            files.append(f"{name}/{entry.name}")
            labels.append(label)
            digest.update(f"{folder.name}/{name}/{entry.name} {entry.stat().st_size}\n".encode())
    return FolderSplit(folder, files, np.asarray(labels, np.int32))


def _load_saved(root: Path) -> ImageFiles:
    hub = import_extra("datasets")
    saved = hub.load_from_disk(str(root))
    for name in ("train", "validation"):
        columns = saved[name].features if name in saved else ()
        if lacking := [column for column in ("image", "label") if column not in columns]:
            raise ValueError(f"The dataset in {root} lacks {', '.join(lacking)} of {name}.")
    train, valid = (
        SavedSplit(f"{root}/{name}", saved[name].cast_column("image", hub.Image(decode=False)))
        for name in ("train", "validation")
    )
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.arrow")):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
    classes = saved["train"].features["label"].num_classes
    return ImageFiles(train, valid, classes, digest.hexdigest())


def image_stream(files: ImageFiles, batch: int, side: int) -> Stream:
    """Batches of `files`: x uint8 [B, side, side, 3], y int32 [B].

    Training images come in a new order each epoch, cropped and mirrored at random; validation
    images come whole, in one mixed order that is always the same, so that the first batches are a
    fair sample of all classes.
    """
    grain = import_extra("grain")

    def augment(record: Record, rng: np.random.Generator) -> tuple[np.ndarray, np.int32]:
        crop = crop_from(rng.random(DRAWS), PAPER_AREA, np)
        return decode_image(record, crop, side), np.int32(record.label)

    def show_whole(record: Record) -> tuple[np.ndarray, np.int32]:
        return decode_image(record, WHOLE, side), np.int32(record.label)

    def batches(split: Split, seed: int, first: int, part: Part) -> Iterator[Any]:
        if split == "train":
            order = grain.MapDataset.source(files.train).seed(seed).shuffle().repeat()
            # After repeat and before any cut, so that a crop depends on its place in the run alone.
            images = order.random_map(augment)
        else:
            order = grain.MapDataset.source(files.valid).seed(ORDER).shuffle()
            images = order.repeat(reseed_each_epoch=False).map(show_whole)
        threads = os.cpu_count() or 1
        return read_batches(images, batch, first, part, threads=threads, ahead=AHEAD)

    return Stream(batches, _example(batch, side), files.checksum)


def blank_image_stream(batch: int, side: int) -> Stream:
    """The shapes of such a stream, without data."""

    def batches(split: Split, seed: int, first: int, part: Part) -> Iterator[Any]:
        raise ValueError("A blank stream has shapes only: make the task with its data.")

    return Stream(batches, _example(batch, side), "")


def _example(batch: int, side: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    x = jax.ShapeDtypeStruct((batch, side, side, 3), np.uint8)
    return x, jax.ShapeDtypeStruct((batch,), np.int32)


def decode_image(record: Record, crop: Crop, side: int) -> np.ndarray:
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


def streamed_vit(images: Stream, config: ViTConfig) -> Task:
    """A vision transformer on batches from the host: x uint8 [B, side, side, channels], y [B].

    Pixels come as bytes, a quarter of what crosses to the device otherwise, and are taken to
    [-1, 1] there.
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
