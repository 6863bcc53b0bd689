"""The documents that token folders are made from: text files, JSON lines, FineWeb."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from celo2.tasks.archive import is_packed, opened
from celo2.tasks.extra import import_extra
from celo2.tasks.fetch import FetchError, check_online, is_offline

HUB = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
SUBSET = "sample-10BT"
PIECE = 16_384  # characters of a text file taken together


class Document(NamedTuple):
    """A text, or a piece of one that is too long to be held; `ends` says that it is the last."""

    text: str
    ends: bool = True


def check_sources(sources: Sequence[str]) -> None:
    """Raises unless there are sources, and each is a file or has a name we know."""
    if not sources:
        raise ValueError(f"Nothing to read: name files or one of {', '.join(HUB)} with --from.")
    for source in sources:
        if source not in HUB and not Path(source).is_file():
            raise FileNotFoundError(f"{source!r} is neither a file nor one of {', '.join(HUB)}.")


def describe(sources: Sequence[str], subset: str = SUBSET) -> str:
    """Where the text is from, in a line: files by their names alone."""
    return ", ".join(f"{HUB[s]} {subset}" if s in HUB else Path(s).name for s in sources)


def read_documents(
    sources: Sequence[str], subset: str = SUBSET, field: str = "text"
) -> Iterator[Document]:
    """The documents of all sources in order.

    Args:
        sources: text files, files of JSON lines (.jsonl), either as .xz or .gz too, or a name of
            `HUB`. A text file comes in pieces of about 16,384 characters, cut after a line.
        subset: of a dataset on the hub.
        field: of a JSON line, the one that holds its text.
    """
    for source in sources:
        if source in HUB:
            yield from _read_hub(HUB[source], subset)
        else:
            yield from _read_file(Path(source), field)


def _read_file(path: Path, field: str) -> Iterator[Document]:
    name = path.stem if is_packed(path) else path.name
    reads_lines = name.lower().endswith(".jsonl")
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            yield from _lines(path, file, field) if reads_lines else _pieces(file)
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not text in UTF-8: {error}.") from error


def _pieces(file: TextIO) -> Iterator[Document]:
    piece = _piece(file)
    while piece:
        following = _piece(file)
        yield Document(piece, ends=not following)
        piece = following


def _piece(file: TextIO) -> str:
    return file.read(PIECE) + file.readline(PIECE)


def _lines(path: Path, file: TextIO, field: str) -> Iterator[Document]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            # JSON can spell half of a character, which no encoding has.
            text = json.loads(line)[field].encode("utf-8", "replace").decode()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"Line {number} of {str(path)!r} is not a JSON object whose {field!r} is a text: "
                f"{error!r}. Name another field with --field."
            ) from error
        if text.strip():
            yield Document(text)


def _read_hub(repository: str, subset: str) -> Iterator[Document]:
    hub = import_extra("datasets")
    reach_hub(f"{repository} is read from the Hugging Face hub")
    try:
        rows: Iterable[dict[str, Any]] = hub.load_dataset(
            repository, subset, split="train", streaming=True
        )
        for row in rows:
            if row["text"].strip():
                yield Document(row["text"])
    except Exception as error:  # the hub's client raises errors of many libraries
        hint = "HF_HUB_OFFLINE is set and its cache may lack it; " if is_offline() else ""
        raise FetchError(
            f"{repository} ({subset}) could not be read: {hint}{type(error).__name__}: {error}"
        ) from error


def reach_hub(why: str) -> None:
    """Raises a FetchError unless the hub answers, or HF_HUB_OFFLINE is set."""
    try:
        check_online()
    except FetchError as error:
        raise FetchError(
            f"{why}, which does not answer: is this machine online? Without network, set "
            "HF_HUB_OFFLINE=1 to use what its cache holds already, or take text files and "
            "--tokenizer bytes (or the path of a tokenizer.json), which need no network."
        ) from error
