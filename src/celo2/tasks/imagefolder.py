"""Image datasets on disk: a folder for each class, or a saved Hugging Face dataset.

The folders are laid out as usual, with the same classes in both halves:

    imagenet/train/CLASS/*.jpg
    imagenet/val/CLASS/*.jpg

A saved dataset is what `datasets.load_dataset(…).save_to_disk("imagenet")` writes, with the splits
train and validation and the columns image and label.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from celo2.tasks.extra import import_extra
from celo2.tasks.folder import ENVIRONMENT, data_folder

NAME = "imagenet"
HUB_NAME = "ILSVRC/imagenet-1k"
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
SAVED = "dataset_dict.json"  # what save_to_disk writes


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


def find(data: str | os.PathLike | None = None) -> ImageFiles:
    """The dataset in the folder `imagenet` of the data folder.

    Args:
        data: the data folder; by default CELO2_DATA, else the cache folder.
    """
    root = data_folder(data) / NAME
    if (root / SAVED).is_file():
        return _find_saved(root)
    if not all((root / half).is_dir() for half in ("train", "val")):
        raise FileNotFoundError(
            f"There are no images in {root}: it should have the folders train/CLASS and val/CLASS "
            f"with image files, or be a Hugging Face dataset, made with datasets.load_dataset("
            f"{HUB_NAME!r}).save_to_disk({str(root)!r}) after accepting its terms at "
            f"https://huggingface.co/datasets/{HUB_NAME}. {ENVIRONMENT} names the folder that "
            f"holds {NAME}."
        )
    return _find_folders(root)


def _find_folders(root: Path) -> ImageFiles:
    names = {half: _subfolders(root / half) for half in ("train", "val")}
    if names["train"] != names["val"]:
        odd = sorted(set(names["train"]) ^ set(names["val"]))
        raise ValueError(
            f"{root}/train has {len(names['train'])} class folders and {root}/val "
            f"{len(names['val'])}; in one only: {', '.join(odd[:5])}. Images belong into one "
            "folder for each class, of the same name in both."
        )
    digest = hashlib.sha256()
    train, valid = (_list(root / half, names[half], digest) for half in ("train", "val"))
    return ImageFiles(train, valid, len(names["train"]), digest.hexdigest())


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        found = sorted(entry.name for entry in entries if entry.is_dir())
    if not found:
        raise ValueError(f"{folder} has no class folders: sort its images into one for each class.")
    return found


def _list(folder: Path, classes: Sequence[str], digest: Any) -> FolderSplit:
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


def _find_saved(root: Path) -> ImageFiles:
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
