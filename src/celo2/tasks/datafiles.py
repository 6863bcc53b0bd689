"""Data files: the folder they are in, how they are opened, identified and downloaded."""

import gzip
import hashlib
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from celo2.rulefile import ask_hub, import_extra, offline_is_set

ENVIRONMENT = "CELO2_DATA"

OPEN = {".xz": lzma.open, ".gz": gzip.open}
# The first bytes of files that are not text, and what to do about them.
SIGNATURES = {
    b"\x1f\x8b": ("gzip", "end its name in .gz"),
    b"\xfd7zXZ\0": ("xz", "end its name in .xz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "decompress it first"),
    b"PK\x03\x04": ("zip", "unpack it first"),
    b"PAR1": ("parquet", "write its text to a text file or to JSON lines first"),
}


def cache_folder() -> Path:
    """Where `celo2 data fetch` puts files when no folder is named."""
    # The XDG specification says to ignore relative paths.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "celo2" / "data"


def data_folder(data: str | os.PathLike | None = None, must_exist: bool = True) -> Path:
    """The folder given by `data`, else by CELO2_DATA, else the cache folder.

    A folder that was named must exist; the cache folder may still be missing.
    """
    given = data if data is not None else os.environ.get(ENVIRONMENT)
    folder = Path(given).expanduser() if given else cache_folder()
    if given and must_exist and not folder.is_dir():
        origin = "data" if data is not None else ENVIRONMENT
        raise FileNotFoundError(
            f"{origin}={str(folder)!r} is not a folder: name one that exists, or leave it out to "
            f"use {cache_folder()} and the embedded datasets."
        )
    return folder


def array_checksum(arrays: Iterable[np.ndarray]) -> str:
    """The SHA-256 of the arrays' bytes, one after the other."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def is_compressed(path: Path) -> bool:
    """Whether the file is compressed, by its name."""
    return path.suffix.lower() in OPEN


@contextmanager
def open_text(path: Path, mode: str = "rb", **options: Any) -> Iterator[Any]:
    """The file, decompressed if its name says so; damage and other formats are ValueErrors."""
    opener: Any = OPEN.get(path.suffix.lower(), open)
    if opener is open:
        _check_plain(path)
    try:
        with opener(path, mode, **options) as file:
            yield file
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} is not a whole {path.suffix} file: {error}.") from error


def _check_plain(path: Path) -> None:
    """Raises a ValueError if the file begins like one of SIGNATURES."""
    with open(path, "rb") as file:
        start = file.read(max(map(len, SIGNATURES)))
    for signature, (kind, way_out) in SIGNATURES.items():
        if start.startswith(signature):
            raise ValueError(f"{str(path)!r} begins like a {kind} file, not like text: {way_out}.")


class FetchError(OSError):
    """A download that failed."""


@contextmanager
def hub_access(what: str, instead: str) -> Iterator[None]:
    """A context that reads `what` from the Hugging Face hub; any failure raises a FetchError.

    Args:
        what: the start of the error message.
        instead: the end of it, what the user can do without network.
    """
    settings = import_extra("huggingface_hub.constants", "data")
    offline = offline_is_set()
    try:
        if not offline:
            ask_hub()
        yield
    except Exception as error:  # the hub's client raises errors of many libraries
        hint = (
            "HF_HUB_OFFLINE is set, and the Hugging Face cache may not hold it: unset it"
            if offline
            else "Is this machine online? Without network, set HF_HUB_OFFLINE=1 to use what the "
            "Hugging Face cache holds already"
        )
        raise FetchError(
            f"{what} could not be read from {settings.ENDPOINT}: {type(error).__name__}: {error}. "
            f"{hint}, {instead}."
        ) from error
