"""Downloads through Hugging Face: the image sets, written in our format, and clear errors."""

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from celo2.tasks.datafiles import (
    array_checksum,
    cache_folder,
    import_extra,
    named_folder,
    write_whole,
)
from celo2.tasks.images import (
    ARRAYS,
    IMAGE_SETS,
    Size,
    check_arrays,
    image_file,
    image_shape,
    read_arrays,
)

MANIFEST = "manifest.json"
TIMEOUT = 5.0  # seconds for the first answer; a hub client alone takes half a minute to give up
CHUNK = 1000  # images decoded at a time


class Source(NamedTuple):
    """Where a dataset is on the hub, and how many images it must have."""

    repository: str
    config: str | None
    column: str
    train: int
    test: int


SOURCES = {
    "mnist": Source("ylecun/mnist", None, "image", 60_000, 10_000),
    "fashion_mnist": Source("zalando-datasets/fashion_mnist", None, "image", 60_000, 10_000),
    "cifar10": Source("uoft-cs/cifar10", None, "img", 50_000, 10_000),
    "svhn": Source("ufldl-stanford/svhn", "cropped_digits", "image", 73_257, 26_032),
}
OFFLINE_IMAGES = "copy the .npz files from another machine, or use the embedded dataset 'digits'"


class FetchProgress(NamedTuple):
    """How far one dataset is: `done` of `total` images; `state` is converting, written or kept."""

    name: str
    state: str
    done: int
    total: int


class FetchError(RuntimeError):
    """A download that could not be made; nothing was written for that dataset."""


def fetch(
    folder: str | os.PathLike | None = None,
    names: Sequence[str] = IMAGE_SETS,
    *,
    full: bool = False,
    force: bool = False,
    report: Callable[[FetchProgress], None] = lambda progress: None,
) -> dict[str, str]:
    """Downloads datasets into `folder` and returns each file's name and SHA-256 of its arrays.

    A file appears whole or not at all, and `manifest.json` beside it keeps its origin. A good file
    that is there already is kept, unless the manifest knows it by another SHA-256.

    Args:
        folder: by default CELO2_DATA, else the cache folder; made if missing.
        names: which of mnist, fashion_mnist, cifar10, svhn.
        full: also write the images at full resolution, `<name>.npz`.
        force: download again what is there already.
        report: called with the progress, about once per thousand images.
    """
    for name in names:
        if name not in SOURCES:
            raise ValueError(f"{name!r} is not one of {', '.join(SOURCES)}.")
    folder = named_folder(folder) or cache_folder()
    sizes: list[Size] = ["8x8", "full"] if full else ["8x8"]
    digests: dict[str, str] = {}
    for name in names:
        kept = {} if force else _good_files(folder, name, sizes)
        digests |= kept
        if len(kept) == len(sizes):
            report(FetchProgress(name, "kept", 1, 1))
        else:
            missing = [size for size in sizes if image_file(name, size) not in kept]
            digests |= _fetch_images(folder, name, missing, report)
    return digests


@contextmanager
def hub_access(what: str, instead: str, timeout: float = TIMEOUT) -> Iterator[None]:
    """A context in which `what` is read from the hub: whatever fails there is a FetchError.

    The hub must answer in time, unless HF_HUB_OFFLINE is set; then what its cache holds is used.

    Args:
        what: begins the sentence that the error is.
        instead: what the user may do without network; it ends that sentence.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if not offline and not _answers(endpoint, timeout):
        raise FetchError(
            f"{what} is read from {endpoint}, which does not answer within {timeout:g} s: is this "
            "machine online? Without network, set HF_HUB_OFFLINE=1 to use what the Hugging Face "
            f"cache holds already, {instead}."
        )
    try:
        yield
    except Exception as error:  # the hub's client raises errors of many libraries
        hint = "HF_HUB_OFFLINE is set and its cache may lack it; " if offline else ""
        raise FetchError(
            f"{what} could not be read: {hint}{type(error).__name__}: {error}"
        ) from error


def _answers(url: str, timeout: float) -> bool:
    answered = threading.Event()

    def ask():
        try:
            request = urllib.request.Request(url, method="HEAD")
            urllib.request.urlopen(request, timeout=timeout).close()
        except urllib.error.HTTPError as error:
            error.close()  # a refusal is an answer
        except (OSError, ValueError):
            return
        answered.set()

    # A thread, because looking up a name has no time-out of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout + 1)
    return answered.is_set()


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """The entries of the folder's manifest by file name; none if there is no readable manifest."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _add_to_manifest(folder: Path, file: str, entry: dict[str, Any]) -> None:
    entries = read_manifest(folder) | {file: entry}
    content = json.dumps(entries, indent=2, sort_keys=True).encode()
    write_whole(folder / MANIFEST, lambda opened: opened.write(content))


def _good_files(folder: Path, name: str, sizes: Sequence[Size]) -> dict[str, str]:
    """The dataset's files that need no download, and the SHA-256 of their arrays."""
    manifest, good = read_manifest(folder), {}
    for size in sizes:
        file = image_file(name, size)
        try:
            arrays = read_arrays(folder / file, image_shape(name, size))
        except (OSError, ValueError):
            continue
        digest = array_checksum(arrays[key] for key in ARRAYS)
        if manifest.get(file, {}).get("sha256", digest) == digest:
            good[file] = digest
    return good


def _fetch_images(
    folder: Path, name: str, sizes: Sequence[Size], report: Callable[[FetchProgress], None]
) -> dict[str, str]:
    datasets, source = import_extra("datasets"), SOURCES[name]
    splits = [_read_split(datasets, name, split, sizes, report) for split in ("train", "test")]
    folder.mkdir(parents=True, exist_ok=True)
    digests = {}
    for size, train, test in zip(sizes, *splits, strict=True):
        file, arrays = image_file(name, size), train | test
        check_arrays(arrays, image_shape(name, size))
        write_whole(folder / file, partial(np.savez_compressed, **arrays))
        digests[file] = array_checksum(arrays[key] for key in ARRAYS)
        entry = {
            "repository": source.repository,
            "sha256": digests[file],
            "shapes": {key: list(arrays[key].shape) for key in ARRAYS},
        }
        _add_to_manifest(folder, file, entry)
    report(FetchProgress(name, "written", source.train + source.test, source.train + source.test))
    return digests


def _read_split(
    datasets: Any, name: str, split: str, sizes: Sequence[Size], report: Callable
) -> list[dict[str, np.ndarray]]:
    """The arrays of one split, for each of the sizes."""
    source = SOURCES[name]
    with hub_access(f"{name} ({source.repository}, {split})", OFFLINE_IMAGES):
        dataset = datasets.load_dataset(source.repository, source.config, split=split)
        chunks = list(_convert(dataset, name, split, sizes, report))
    *images, labels = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    expected = source.train if split == "train" else source.test
    if len(labels) != expected:
        raise FetchError(f"{name} has {len(labels)} {split} images instead of {expected}.")
    return [{f"{split}_x": x, f"{split}_y": labels} for x in images]


def _convert(
    dataset: Any, name: str, split: str, sizes: Sequence[Size], report: Callable
) -> Iterator[tuple[np.ndarray, ...]]:
    source = SOURCES[name]
    done = source.train if split == "test" else 0
    for batch in dataset.iter(batch_size=CHUNK):
        images = np.stack([np.asarray(image) for image in batch[source.column]])
        labels = np.asarray(batch["label"]).astype(np.uint8)
        yield *(shrink(images) if size == "8x8" else images for size in sizes), labels
        done += len(labels)
        report(FetchProgress(name, "converting", done, source.train + source.test))


# Grey 8×8 versions of images, by exact area averaging.


def shrink(images: np.ndarray, size: int = 8) -> np.ndarray:
    """[N, size, size] uint8 from [N, H, W] or [N, H, W, 3] uint8, rounded half up."""
    images = images.astype(np.float32)
    grey = images if images.ndim == 3 else images.mean(axis=-1)
    return np.floor(area_average(grey, size) + np.float32(0.5)).astype(np.uint8)


def area_average(images: np.ndarray, size: int = 8) -> np.ndarray:
    """[N, size, size] float32: each pixel the mean of the area of [N, H, W] that it covers."""
    return _average_axis(_average_axis(images, size, axis=1), size, axis=2)


def area_weights(source: int, target: int) -> np.ndarray:
    """[target, source]: each source pixel's part in each output pixel; rows sum to one."""
    edges = np.arange(target + 1) * source / target
    pixels = np.arange(source)
    covered = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return (np.clip(covered, 0, None) * target / source).astype(np.float32)


def _average_axis(images: np.ndarray, size: int, axis: int) -> np.ndarray:
    # One pixel after the other, not a matrix product: a colour image has exact ties between two
    # grey levels, and the order of a library's sums must not decide them.
    weights = area_weights(images.shape[axis], size)
    source = np.moveaxis(images.astype(np.float32), axis, 0)
    average = np.zeros((size, *source.shape[1:]), np.float32)
    for target, pixel in zip(*np.nonzero(weights), strict=True):
        average[target] += weights[target, pixel] * source[pixel]
    return np.moveaxis(average, 0, axis)
