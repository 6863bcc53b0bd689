"""Downloads through Hugging Face: the image sets and a text, written in our formats."""

import hashlib
import html
import json
import lzma
import os
import random
import re
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
    open_text,
    write_atomically,
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
TIMEOUT = 5.0  # seconds for the first answer; a hub client alone takes half a minute to give up
CHUNK = 1000  # images decoded at a time


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
OFFLINE_IMAGES = "copy the .npz files from another machine, or use the embedded dataset 'digits'"

ARTICLES = "wikipedia"  # its name in `fetch`
WIKIPEDIA_REPOSITORY, WIKIPEDIA_DUMP = "wikimedia/wikipedia", "20231101.en"
WIKIPEDIA_BYTES = 36_000_000
WIKIPEDIA_VALID = 0.05  # of the bytes
DRAWN = 0.1  # of the articles: 2,000 of the first 20,000 or so
SHORTEST = 1500  # characters
# SHA-256 of the records' text, training followed by validation.
RECORDS_TEXT = "04b541c19bc74f86206848e56e147aaac284f216f1041a0bef93cc285a288518"
OFFLINE_TEXT = f"name a text file of your own with --text, or use the embedded text {PYTHON_DOCS!r}"


class FetchProgress(NamedTuple):
    """How far one dataset is: `done` of `total` images, or bytes of text.

    `state` is converting, written or kept.
    """

    name: str
    state: str
    done: int
    total: int


Report = Callable[[FetchProgress], None]


class FetchError(OSError):
    """A download that could not be made; nothing was written for that dataset."""


def fetch(
    folder: str | os.PathLike | None = None,
    names: Sequence[str] = IMAGE_SETS,
    *,
    full: bool = False,
    force: bool = False,
    report: Report = lambda progress: None,
) -> dict[str, str]:
    """Downloads datasets into `folder` and returns the SHA-256 of each file's content by its name.

    That is of the arrays or the text, before they are compressed. A file appears whole or not at
    all, and `manifest.json` beside it keeps its origin. A good file that is there already is kept,
    unless the manifest has another SHA-256 for it.

    Args:
        folder: by default CELO2_DATA, else the cache folder; made if missing.
        names: which of mnist, fashion_mnist, cifar10, svhn, wikipedia.
        full: also write the images at full resolution, `<name>.npz`.
        force: download again what is there already.
        report: called with the progress, about once per thousand images, or for each article.
    """
    for name in names:
        if name not in (*SOURCES, ARTICLES):
            raise ValueError(f"{name!r} is not one of {', '.join((*SOURCES, ARTICLES))}.")
    folder = named_folder(folder) or cache_folder()
    sizes: list[Size] = ["8x8", "full"] if full else ["8x8"]
    digests: dict[str, str] = {}
    for name in names:
        if name == ARTICLES:
            digests |= _fetch_wikipedia(folder, force, report)
        else:
            digests |= _fetch_images(folder, name, sizes, force, report)
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
    write_atomically(folder / MANIFEST, lambda opened: opened.write(content))


def _is_good(folder: Path, file: str, digest: str) -> bool:
    """Whether the manifest has the file with that SHA-256, or not at all."""
    return read_manifest(folder).get(file, {}).get("sha256", digest) == digest


def _fetch_images(
    folder: Path, name: str, sizes: Sequence[Size], force: bool, report: Report
) -> dict[str, str]:
    digests = {} if force else _kept_images(folder, name, sizes)
    missing: list[Size] = [size for size in sizes if image_file(name, size) not in digests]
    if not missing:
        report(FetchProgress(name, "kept", 1, 1))
        return digests
    datasets, source = import_extra("datasets"), SOURCES[name]
    splits = [_read_split(datasets, name, split, missing, report) for split in ("train", "test")]
    folder.mkdir(parents=True, exist_ok=True)
    for size, train, test in zip(missing, *splits, strict=True):
        file, arrays = image_file(name, size), train | test
        check_arrays(arrays, image_shape(name, size))
        write_atomically(folder / file, partial(np.savez_compressed, **arrays))
        digests[file] = array_checksum(arrays[key] for key in ARRAYS)
        entry = {
            "repository": source.repository,
            "sha256": digests[file],
            "shapes": {key: list(arrays[key].shape) for key in ARRAYS},
        }
        _add_to_manifest(folder, file, entry)
    report(FetchProgress(name, "written", source.train + source.test, source.train + source.test))
    return digests


def _kept_images(folder: Path, name: str, sizes: Sequence[Size]) -> dict[str, str]:
    """The dataset's files that need no download, and the SHA-256 of their arrays."""
    kept = {}
    for size in sizes:
        file = image_file(name, size)
        try:
            arrays = read_arrays(folder / file, image_shape(name, size))
        except (OSError, ValueError):
            continue
        digest = array_checksum(arrays[key] for key in ARRAYS)
        if _is_good(folder, file, digest):
            kept[file] = digest
    return kept


def _read_split(
    datasets: Any, name: str, split: str, sizes: Sequence[Size], report: Report
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
    dataset: Any, name: str, split: str, sizes: Sequence[Size], report: Report
) -> Iterator[tuple[np.ndarray, ...]]:
    source = SOURCES[name]
    done = source.train if split == "test" else 0
    for batch in dataset.iter(batch_size=CHUNK):
        images = np.stack([np.asarray(image) for image in batch[source.column]])
        labels = np.asarray(batch["label"]).astype(np.uint8)
        yield *(shrink_images(images) if size == "8x8" else images for size in sizes), labels
        done += len(labels)
        report(FetchProgress(name, "converting", done, source.train + source.test))


# Grey 8×8 versions of images, by exact area averaging.


def shrink_images(images: np.ndarray, size: int = 8) -> np.ndarray:
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


# Articles of the English Wikipedia, made into a text as that of the records was, from a newer dump.


def compare_with_records(data: str | os.PathLike | None = None) -> str:
    """A line that says whether the data folder's Wikipedia is the text of the records."""
    digest = load_text(WIKIPEDIA, data).checksum()
    if digest == RECORDS_TEXT:
        return f"{WIKIPEDIA} is the text of the records: sha256 {digest}"
    return (
        f"{WIKIPEDIA} is another text than that of the records, so losses cannot be compared with "
        f"theirs: sha256 {digest}, theirs {RECORDS_TEXT}"
    )


def _fetch_wikipedia(folder: Path, force: bool, report: Report) -> dict[str, str]:
    paths = text_files(WIKIPEDIA, folder)
    if not force and (kept := _kept_texts(folder, paths)):
        report(FetchProgress(ARTICLES, "kept", 1, 1))
        return kept
    articles = list(_draw_articles(report))
    random.Random(0).shuffle(articles)
    folder.mkdir(parents=True, exist_ok=True)
    digests = {}
    for path, text in zip(paths, _split_articles(articles), strict=True):
        write_atomically(path, lambda file, text=text: file.write(lzma.compress(text)))
        digests[path.name] = hashlib.sha256(text).hexdigest()
        entry = {
            "repository": f"{WIKIPEDIA_REPOSITORY} {WIKIPEDIA_DUMP}",
            "sha256": digests[path.name],
            "bytes": len(text),
        }
        _add_to_manifest(folder, path.name, entry)
    report(FetchProgress(ARTICLES, "written", WIKIPEDIA_BYTES, WIKIPEDIA_BYTES))
    return digests


def _kept_texts(folder: Path, paths: Sequence[Path]) -> dict[str, str]:
    """The files and the SHA-256 of their texts if both are good, else nothing."""
    kept = {}
    for path in paths:
        try:
            with open_text(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError):
            return {}
        if not _is_good(folder, path.name, digest):
            return {}
        kept[path.name] = digest
    return kept


def _draw_articles(report: Report) -> Iterator[bytes]:
    """Articles drawn from the dump until they have WIKIPEDIA_BYTES, in the dump's order."""
    datasets, draw, size = import_extra("datasets"), random.Random(0), 0
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
            done = min(size, WIKIPEDIA_BYTES)
            report(FetchProgress(ARTICLES, "converting", done, WIKIPEDIA_BYTES))
            if size >= WIKIPEDIA_BYTES:
                return
    raise FetchError(f"{what} ended after {size:,} bytes instead of {WIKIPEDIA_BYTES:,}.")


def clean_article(title: str, text: str) -> str:
    """The article under its title: no tags or entities, one blank or empty line in a row.

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
