"""Text files as they are found: plain, or compressed in a way that their name says."""

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OPEN = {".xz": lzma.open, ".gz": gzip.open}
# How files begin that are no text, and what to do about them.
UNPACK = "unpack it first"
SIGNS = {
    b"\x1f\x8b": ("gzip", "end its name in .gz"),
    b"\xfd7zXZ\0": ("xz", "end its name in .xz"),
    b"\x28\xb5\x2f\xfd": ("zstd", UNPACK),
    b"PK\x03\x04": ("zip", UNPACK),
    b"PAR1": ("parquet", "write its text to a text file or to JSON lines first"),
}


def is_packed(path: Path) -> bool:
    """Whether the file is compressed, by its name."""
    return path.suffix.lower() in OPEN


@contextmanager
def opened(path: Path, mode: str = "rb", **options: Any) -> Iterator[Any]:
    """The file, decompressed if its name ends so; damage and other formats are ValueErrors."""
    opener: Any = OPEN.get(path.suffix.lower())
    if opener is None:
        check_plain(path)
        opener = open
    try:
        with opener(path, mode, **options) as file:
            yield file
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{str(path)!r} is not a whole {path.suffix} file: {error}.") from error


def check_plain(path: Path) -> None:
    """Raises a ValueError if the file begins as one does that is no text."""
    with open(path, "rb") as file:
        start = file.read(max(map(len, SIGNS)))
    for sign, (kind, way_out) in SIGNS.items():
        if start.startswith(sign):
            raise ValueError(f"{str(path)!r} begins as a {kind} file, not as a text: {way_out}.")
