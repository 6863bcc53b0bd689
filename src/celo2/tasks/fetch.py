"""Downloads the image datasets through Hugging Face and writes them in our format."""

import importlib
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from celo2.tasks.folder import cache_folder, checksum, named_folder
from celo2.tasks.images import ARRAYS, NAMES, Size, check_arrays, image_shape, read_arrays
from celo2.tasks.shrink import shrink

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


class Progress(NamedTuple):
    """How far one dataset is: `done` of `total` images; `state` is converting, written or kept."""

    name: str
    state: str
    done: int
    total: int


class FetchError(RuntimeError):
    """A download that could not be made; nothing was written for that dataset."""


def fetch(
    folder: str | os.PathLike | None = None,
    names: Sequence[str] = NAMES,
    *,
    full: bool = False,
    force: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
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
    manifest = read_manifest(folder)
    kept: dict[str, str] = {}
    missing: dict[str, list[Size]] = {}
    for name in names:
        for size in ("8x8", "full") if full else ("8x8",):
            digest = None if force else _good_digest(folder, manifest, name, size)
            if digest is None:
                missing.setdefault(name, []).append(size)
            else:
                kept[file_name(name, size)] = digest
                report(Progress(name, "kept", 1, 1))
    return kept | (_download(folder, manifest, missing, report) if missing else {})


def file_name(name: str, size: Size) -> str:
    """`mnist_8x8.npz` or `mnist.npz`."""
    return f"{name}_8x8.npz" if size == "8x8" else f"{name}.npz"


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """The entries of the folder's manifest by file name; none if there is no readable manifest."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE asks to use only what the hub's cache holds."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_online(timeout: float = TIMEOUT) -> None:
    """Raises a FetchError unless the hub answers in time, or HF_HUB_OFFLINE is set."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if is_offline() or _answers(endpoint, timeout):
        return
    raise FetchError(
        f"{endpoint} does not answer within {timeout:g} s: is this machine online? Without "
        "network, set HF_HUB_OFFLINE=1 to use datasets the Hugging Face cache holds already, copy "
        "the .npz files from another machine, or use the embedded dataset 'digits'."
    )


def _answers(url: str, timeout: float) -> bool:
    answered = threading.Event()

    def ask():
        try:
            urllib.request.urlopen(url, timeout=timeout).close()
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


def _import_hub() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise FetchError(
            "Downloads need the Hugging Face library `datasets`: `pip install celo2[data]`."
        ) from error


def _good_digest(folder: Path, manifest: dict, name: str, size: Size) -> str | None:
    file = file_name(name, size)
    try:
        arrays = read_arrays(folder / file, image_shape(name, size))
    except (OSError, ValueError):
        return None
    digest = checksum(arrays[key] for key in ARRAYS)
    return digest if manifest.get(file, {}).get("sha256", digest) == digest else None


def _download(
    folder: Path, manifest: dict, missing: dict[str, list[Size]], report: Callable
) -> dict[str, str]:
    hub = _import_hub()
    check_online()
    folder.mkdir(parents=True, exist_ok=True)
    digests = {}
    for name, sizes in missing.items():
        splits = [_read_split(hub, name, split, sizes, report) for split in ("train", "test")]
        for size, *arrays in zip(sizes, *splits, strict=True):
            file = file_name(name, size)
            manifest[file] = _write_arrays(folder / file, arrays[0] | arrays[1], name, size)
            digests[file] = manifest[file]["sha256"]
            _write_whole(folder / MANIFEST, _json_writer(manifest))
        total = SOURCES[name].train + SOURCES[name].test
        report(Progress(name, "written", total, total))
    return digests


def _read_split(
    hub: Any, name: str, split: str, sizes: list[Size], report: Callable
) -> list[dict[str, np.ndarray]]:
    source = SOURCES[name]
    try:
        dataset = hub.load_dataset(source.repository, source.config, split=split)
        chunks = list(_convert(dataset, name, split, sizes, report))
    except Exception as error:  # the hub's client raises errors of many libraries
        hint = "HF_HUB_OFFLINE is set and its cache may lack it; " if is_offline() else ""
        raise FetchError(
            f"{name} ({source.repository}, {split}) could not be read: {hint}"
            f"{type(error).__name__}: {error}"
        ) from error
    *images, labels = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    expected = source.train if split == "train" else source.test
    if len(labels) != expected:
        raise FetchError(f"{name} has {len(labels)} {split} images instead of {expected}.")
    return [{f"{split}_x": x, f"{split}_y": labels} for x in images]


def _convert(
    dataset: Any, name: str, split: str, sizes: list[Size], report: Callable
) -> Iterator[tuple[np.ndarray, ...]]:
    source = SOURCES[name]
    done = source.train if split == "test" else 0
    for batch in dataset.iter(batch_size=CHUNK):
        images = np.stack([np.asarray(image) for image in batch[source.column]])
        labels = np.asarray(batch["label"]).astype(np.uint8)
        yield *(shrink(images) if size == "8x8" else images for size in sizes), labels
        done += len(labels)
        report(Progress(name, "converting", done, source.train + source.test))


def _write_arrays(path: Path, arrays: dict[str, Any], name: str, size: Size) -> dict[str, Any]:
    check_arrays(arrays, image_shape(name, size))
    _write_whole(path, lambda file: np.savez_compressed(file, **arrays))
    return {
        "repository": SOURCES[name].repository,
        "sha256": checksum(arrays[key] for key in ARRAYS),
        "shapes": {key: list(arrays[key].shape) for key in ARRAYS},
    }


def _json_writer(entries: dict) -> Callable:
    return lambda file: file.write(json.dumps(entries, indent=2, sort_keys=True).encode())


def _write_whole(path: Path, write: Callable) -> None:
    # A rename within a folder is atomic: a reader sees the old file or the new one.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
