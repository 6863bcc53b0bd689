"""Where data files are looked for, and the digest by which they are known."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

ENVIRONMENT = "CELO2_DATA"


def cache_folder() -> Path:
    """Where `celo2 data fetch` puts files when no folder is named."""
    # The XDG specification says to ignore relative paths.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "celo2" / "data"


def named_folder(data: str | os.PathLike | None = None) -> Path | None:
    """The folder given by `data` or else by CELO2_DATA, which need not exist."""
    given = data if data is not None else os.environ.get(ENVIRONMENT)
    return Path(given).expanduser() if given else None


def data_folder(data: str | os.PathLike | None = None) -> Path:
    """The folder given by `data`, else by CELO2_DATA, else the cache folder.

    A folder that was named must exist; the cache folder may be missing still.
    """
    folder = named_folder(data)
    if folder is None:
        return cache_folder()
    if not folder.is_dir():
        origin = "data" if data is not None else ENVIRONMENT
        raise FileNotFoundError(
            f"{origin}={str(folder)!r} is not a folder: name one that exists, or leave it out to "
            f"use {cache_folder()} and the embedded datasets."
        )
    return folder


def checksum(arrays: Iterable[np.ndarray]) -> str:
    """The SHA-256 of the arrays' bytes, one after the other."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
