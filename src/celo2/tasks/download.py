"""Downloads from the Hugging Face hub: the image sets and a text, written in our formats."""

import hashlib
import html
import io
import json
import lzma
import math
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from celo2.rulefile import import_extra, write_whole
from celo2.tasks.datafiles import (
    FetchError,
    array_checksum,
    data_folder,
    hub_access,
    open_text,
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
from celo2.tasks.text import PYTHON_DOCS, WIKIPEDIA, load_text, text_files

MANIFEST = "manifest.json"
SMALL_SIDE = 8  # pixels of a shrunk image's side
CHUNK = 1000  # images shrunk at a time


class ImageSource(NamedTuple):
    """Where a dataset is on the hub, and how many images it must have."""

    repository: str
    config: str | None
    column: str
    train: int
    test: int


SOURCES = {
    "mnist": ImageSource("ylecun/mnist", None, "image", 60_000, 10_000),
    "fashion_mnist": ImageSource("zalando-datasets/fashion_mnist", None, "image", 60_000, 10_000),
    "cifar10": ImageSource("uoft-cs/cifar10", None, "img", 50_000, 10_000),
    "svhn": ImageSource("ufldl-stanford/svhn", "cropped_digits", "image", 73_257, 26_032),
}
OFFLINE_IMAGES = (
    "copy the .npz files from another machine, or use the embedded dataset 'digits' (from "
    "scikit-learn)"
)

ARTICLES = "wikipedia"  # its name in `fetch`
WIKIPEDIA_REPOSITORY, WIKIPEDIA_DUMP = "wikimedia/wikipedia", "20231101.en"
WIKIPEDIA_BYTES = 36_000_000
WIKIPEDIA_VALID = 0.05  # of the bytes
DRAWN = 0.1  # of the articles: 2,000 of the first 20,000 or so
SHORTEST = 1500  # characters
# SHA-256 of the records' text, training followed by validation.
RECORDS_TEXT = "04b541c19bc74f86206848e56e147aaac284f216f1041a0bef93cc285a288518"
OFFLINE_TEXT = f"name a text file of your own with --text, or use the embedded text {PYTHON_DOCS!r}"


Report = Callable[[str], None]


def fetch(
    folder: str | os.PathLike | None = None,
    names: Sequence[str] = IMAGE_SETS,
    *,
    full: bool = False,
    force: bool = False,
    report: Report = lambda line: None,
) -> dict[str, str]:
    """Downloads datasets into `folder` and returns the SHA-256 of each file's content by its name.

    The SHA-256 is of the arrays or the text before compression. Files are written atomically, and
    `manifest.json` in the same folder has their origin. A valid file that exists already is kept,
    unless the manifest has another SHA-256 for it.

    Args:
        folder: by default CELO2_DATA, else the cache folder; made if missing.
        names: which of mnist, fashion_mnist, cifar10, svhn, wikipedia.
        full: also write the images at full resolution, `<name>.npz`.
        force: download again what exists already.
        report: called with a line for each download; the hub's library shows its own progress.
    """
    for name in names:
        if name not in (*SOURCES, ARTICLES):
            raise ValueError(f"{name!r} is not one of {', '.join((*SOURCES, ARTICLES))}.")
    folder = data_folder(folder, must_exist=False)
    sizes: list[Size] = ["8x8", "full"] if full else ["8x8"]
    digests: dict[str, str] = {}
    for name in names:
        if name == ARTICLES:
            digests |= _fetch_wikipedia(folder, force, report)
        else:
            digests |= _fetch_images(folder, name, sizes, force, report)
    return digests


# Files and the manifest beside them.


def _read_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """The entries of the folder's manifest by file name; none if there is no readable manifest."""
    try:
        entries = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _write_file(folder: Path, file: str, content: bytes, entry: dict[str, Any]) -> None:
    """Writes a file of the folder, then its entry in the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / file, content)
    entries = _read_entries(folder) | {file: entry}
    write_whole(folder / MANIFEST, json.dumps(entries, indent=2, sort_keys=True).encode())


def _good_files(folder: Path, readers: dict[str, Callable[[Path], str]]) -> dict[str, str]:
    """The SHA-256 of the files that their readers accept and that agree with the manifest."""
    known, good = _read_entries(folder), {}
    for file, read in readers.items():
        try:
            digest = read(folder / file)
        except (OSError, ValueError):
            continue
        if known.get(file, {}).get("sha256", digest) == digest:
            good[file] = digest
    return good


# Image sets.


def _fetch_images(
    folder: Path, name: str, sizes: Sequence[Size], force: bool, report: Report
) -> dict[str, str]:
    source = SOURCES[name]
    readers = {
        image_file(name, size): partial(_image_digest, shape=image_shape(name, size))
        for size in sizes
    }
    digests = {} if force else _good_files(folder, readers)
    missing: list[Size] = [size for size in sizes if image_file(name, size) not in digests]
    if not missing:
        return digests
    report(f"{name}: reading {source.repository}")
    images = _read_split(name, "train") | _read_split(name, "test")
    for size in missing:
        file = image_file(name, size)
        arrays: dict[str, Any] = {key: _resize(images[key], size) for key in ARRAYS}
        check_arrays(arrays, image_shape(name, size))
        digests[file] = array_checksum(arrays.values())
        entry = {
            "repository": source.repository,
            "sha256": digests[file],
            "shapes": {key: list(arrays[key].shape) for key in ARRAYS},
        }
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays)
        _write_file(folder, file, packed.getvalue(), entry)
    return digests


def _image_digest(path: Path, shape: tuple[int, ...]) -> str:
    return array_checksum(read_arrays(path, shape)[key] for key in ARRAYS)


def _read_split(name: str, split: str) -> dict[str, np.ndarray]:
    source, datasets = SOURCES[name], import_extra("datasets", "data")
    with hub_access(f"{name} ({source.repository}, {split})", OFFLINE_IMAGES):
        dataset = datasets.load_dataset(source.repository, source.config, split=split)
        columns = dataset.with_format("numpy")[:]
    x, y = columns[source.column], columns["label"].astype(np.uint8)
    expected = source.train if split == "train" else source.test
    if len(y) != expected:
        raise FetchError(f"{name} has {len(y)} {split} images instead of {expected}.")
    return {f"{split}_x": x, f"{split}_y": y}


def _resize(array: np.ndarray, size: Size) -> np.ndarray:
    if size == "full" or array.ndim == 1:  # labels have no size
        return array
    chunks = (array[i : i + CHUNK] for i in range(0, len(array), CHUNK))
    return np.concatenate([shrink_images(chunk) for chunk in chunks])


def shrink_images(images: np.ndarray) -> np.ndarray:
    """[N, 8, 8] uint8 from [N, H, W] or [N, H, W, 3]: grey area averages, rounded half up."""
    images = images.astype(np.float32)
    grey = images if images.ndim == 3 else images.mean(axis=-1)
    average = _average_axis(_average_axis(grey, axis=1), axis=2)
    return np.floor(average + np.float32(0.5)).astype(np.uint8)


def _average_axis(images: np.ndarray, axis: int) -> np.ndarray:
    """The axis cut into SMALL_SIDE equal parts, each of them averaged."""
    # Pixels that a boundary cuts are first split into equal copies.
    copies = SMALL_SIDE // math.gcd(SMALL_SIDE, images.shape[axis])
    parts = np.moveaxis(images, axis, 0).repeat(copies, axis=0)
    parts = parts.reshape(SMALL_SIDE, -1, *parts.shape[1:])
    # Summed in a fixed order: a colour image has exact ties between two grey levels, which must not
    # depend on the order of a library's sums.
    total = reduce(np.add, np.moveaxis(parts, 1, 0))
    return np.moveaxis(total / np.float32(parts.shape[1]), 0, axis)


# Articles of the English Wikipedia, made into a text as that of the records was, from a newer dump.


def compare_with_records(data: str | os.PathLike | None = None) -> str:
    """A line that says whether the data folder's Wikipedia is the text of the records."""
    digest = load_text(WIKIPEDIA, data).checksum()
    if digest == RECORDS_TEXT:
        return f"{WIKIPEDIA} is the text of the records: sha256 {digest}"
    return (
        f"{WIKIPEDIA} is not the text of the records, so losses cannot be compared with theirs: "
        f"sha256 {digest}, theirs {RECORDS_TEXT}"
    )


def _fetch_wikipedia(folder: Path, force: bool, report: Report) -> dict[str, str]:
    files = [path.name for path in text_files(WIKIPEDIA, folder)]
    good = {} if force else _good_files(folder, dict.fromkeys(files, _text_digest))
    if len(good) == len(files):
        return good
    report(f"{ARTICLES}: reading {WIKIPEDIA_REPOSITORY}, {WIKIPEDIA_DUMP}")
    articles = list(_draw_articles())
    random.Random(0).shuffle(articles)
    digests = {}
    for file, text in zip(files, _split_articles(articles), strict=True):
        digests[file] = hashlib.sha256(text).hexdigest()
        entry = {
            "repository": f"{WIKIPEDIA_REPOSITORY} {WIKIPEDIA_DUMP}",
            "sha256": digests[file],
            "bytes": len(text),
        }
        _write_file(folder, file, lzma.compress(text), entry)
    return digests


def _text_digest(path: Path) -> str:
    with open_text(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _draw_articles() -> Iterator[bytes]:
    """Articles drawn from the dump until they have WIKIPEDIA_BYTES, in the dump's order."""
    datasets, draw, size = import_extra("datasets", "data"), random.Random(0), 0
    what = f"{ARTICLES} ({WIKIPEDIA_REPOSITORY}, {WIKIPEDIA_DUMP})"
    with hub_access(what, OFFLINE_TEXT):
        rows = datasets.load_dataset(
            WIKIPEDIA_REPOSITORY, WIKIPEDIA_DUMP, split="train", streaming=True
        )
        for row in rows:
            # Drawn before the length is looked at, so that a draw depends on its place alone.
            if draw.random() >= DRAWN or len(row["text"]) < SHORTEST:
                continue
            article = clean_article(row["title"], row["text"]).encode()
            yield article
            size += len(article)
            if size >= WIKIPEDIA_BYTES:
                return
    raise FetchError(f"{what} ended after {size:,} bytes instead of {WIKIPEDIA_BYTES:,}.")


def clean_article(title: str, text: str) -> str:
    """The article under its title: no tags or entities, at most one space or empty line in a row.

    >>> clean_article("Sum", "1  &lt; 2<br/>\\n\\n\\nEnd ")
    'Sum\\n\\n1 < 2\\n\\nEnd\\n'
    """
    text = html.unescape(re.sub(r"</?[a-zA-Z][^<>\n]*>", "", text))
    text = re.sub(r"[^\S\n]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return f"{title}\n\n" + re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _split_articles(articles: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Training text and validation text; the latter are the last articles."""
    cut, valid, total = len(articles), 0, sum(map(len, articles))
    while valid < WIKIPEDIA_VALID * total:
        cut -= 1
        valid += len(articles[cut])
    return b"\n\n".join(articles[:cut]), b"\n\n".join(articles[cut:])
