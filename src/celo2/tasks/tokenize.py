"""Makes token folders: documents in, files of token numbers out."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from celo2.tasks import documents
from celo2.tasks.documents import PIECE, SUBSET, Document
from celo2.tasks.stream import Split
from celo2.tasks.tokenizer import Tokenizer, load_tokenizer
from celo2.tasks.tokens import (
    FORMAT,
    MANIFEST,
    SPLITS,
    VERSION,
    TokenFile,
    TokenFolder,
    read_folder,
    token_dtype,
)

SHARD = 100_000_000  # tokens of a file
VALID_EVERY = 100
BATCH_CHARACTERS, BATCH_DOCUMENTS = 4_000_000, 1000  # encoded at a time


class Progress(NamedTuple):
    """How far the making of a folder is; `limit` is None where only the text's end ends it."""

    documents: int
    tokens: int
    limit: int | None


def make_tokens(
    out: str | os.PathLike,
    sources: Sequence[str | os.PathLike],
    *,
    tokenizer: str = "gpt2",
    end_of_text: str | None = None,
    subset: str = SUBSET,
    field: str = "text",
    limit: int | None = None,
    valid_every: int = VALID_EVERY,
    shard: int = SHARD,
    force: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
) -> TokenFolder:
    """Makes the token folder `out` and returns it: whole, or not at all.

    Documents 0, `valid_every`, 2 · `valid_every` … are for validation, the others for training.

    Args:
        out: the folder, which must not exist yet.
        sources: what to read: see `celo2.tasks.documents.read_documents`, as for the next two.
        subset: of a dataset on the hub.
        field: of a JSON line, the one that holds its text.
        tokenizer: bytes, a file or a name on the hub: see `celo2.tasks.tokenizer.load_tokenizer`.
        end_of_text: the token that ends a document, where it is none of the usual names.
        limit: stop with the document that brings the tokens of both splits to this number.
        valid_every: one document in so many is for validation.
        shard: tokens of a file, at most.
        force: replace a token folder that is there already.
        report: called with the progress, after every document.
    """
    _check_counts(limit=(limit, 1), valid_every=(valid_every, 2), shard=(shard, 1))
    out, names = Path(out).expanduser().resolve(), [os.fspath(source) for source in sources]
    _check_free(out, force)
    documents.check_sources(names)
    chosen = load_tokenizer(tokenizer, end_of_text)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
    writers = {split: _Writer(temporary, split, shard) for split in SPLITS}
    try:
        temporary.mkdir()
        found = documents.read_documents(names, subset, field)
        counts = _write(found, chosen, writers, limit, valid_every, report)
        files = {split: writer.finish() for split, writer in writers.items()}
        _check_splits(files, sum(counts.values()))
        source = documents.describe(names, subset)
        # Last, so that a folder without all its files does not read as one.
        manifest = _manifest(source, chosen, files, counts)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        _put(temporary, out, force)
    finally:
        for writer in writers.values():
            writer.finish()
        shutil.rmtree(temporary, ignore_errors=True)
    return read_folder(out)


def _check_counts(**counts: tuple[int | None, int]) -> None:
    for name, (value, least) in counts.items():
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}.")


def _check_free(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not force:
        raise FileExistsError(f"{out} exists already: name another folder, or --force.")
    if not (out / MANIFEST).is_file():
        raise FileExistsError(f"{out} is no token folder, and --force replaces nothing else.")


def _write(
    found: Iterable[Document],
    tokenizer: Tokenizer,
    writers: dict[str, "_Writer"],
    limit: int | None,
    valid_every: int,
    report: Callable[[Progress], None],
) -> dict[str, int]:
    """Writes the documents until there are no more, or `limit` tokens; how many each split got."""
    counts: dict[str, int] = dict.fromkeys(SPLITS, 0)
    tokens = 0
    for number, row in enumerate(_encode(found, tokenizer)):
        split = "train" if number % valid_every else "valid"
        writers[split].write(row)
        counts[split] += 1
        tokens += len(row)
        report(Progress(number + 1, tokens, limit))
        if limit is not None and tokens >= limit:
            break
    return counts


def _encode(found: Iterable[Document], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    dtype = token_dtype(tokenizer.vocab)
    end = dtype.type(tokenizer.end_of_text)
    for batch in _batches(found):
        rows = tokenizer.encode([document.text for document in batch])
        for document, row in zip(batch, rows, strict=True):
            row = np.asarray(row, dtype)
            yield np.append(row, end) if document.ends else row


def _batches(found: Iterable[Document]) -> Iterator[list[Document]]:
    batch, characters = [], 0
    for document in found:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _Writer:
    """The files of one split, one after the other; `finish` closes the last and returns all."""

    def __init__(self, folder: Path, split: Split, shard: int):
        self.folder, self.split, self.shard = folder, split, shard
        self.files: list[TokenFile] = []
        self.file: IO[bytes] | None = None
        self.tokens, self.digest = 0, hashlib.sha256()

    def write(self, tokens: np.ndarray) -> None:
        while len(tokens):
            if self.file is None:
                self.file = open(self.folder / self._name(), "xb")
                self.tokens, self.digest = 0, hashlib.sha256()
            now, tokens = np.split(tokens, [self.shard - self.tokens])
            self.file.write(now.data)
            self.digest.update(now.data)
            self.tokens += len(now)
            if self.tokens == self.shard:
                self.finish()

    def finish(self) -> list[TokenFile]:
        if self.file is not None:
            with self.file as file:
                file.flush()
                os.fsync(file.fileno())
            self.files.append(TokenFile(self._name(), self.tokens, self.digest.hexdigest()))
            self.file = None
        return self.files

    def _name(self) -> str:
        return f"{self.split}-{len(self.files):05d}.bin"


def _check_splits(files: Mapping[str, list[TokenFile]], count: int) -> None:
    for split in SPLITS:
        if not files[split]:
            raise ValueError(
                f"The text has {count} documents (a text file has one for every {PIECE:,} "
                f"characters), too few for any to be for {split}: give a longer text."
            )


def _manifest(
    source: str,
    tokenizer: Tokenizer,
    files: Mapping[str, list[TokenFile]],
    counts: Mapping[str, int],
) -> dict[str, Any]:
    splits = {
        split: {
            "tokens": sum(file.tokens for file in files[split]),
            "documents": counts[split],
            "files": [file._asdict() for file in files[split]],
        }
        for split in SPLITS
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": source,
        "tokenizer": tokenizer.name,
        "vocab": tokenizer.vocab,
        "end_of_text": tokenizer.end_of_text,
        "dtype": token_dtype(tokenizer.vocab).name,
        "splits": splits,
    }


def _put(temporary: Path, out: Path, force: bool) -> None:
    """Renames the folder, and deletes the one that was in its place."""
    _check_free(out, force)
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        os.rename(out, old)
    try:
        os.rename(temporary, out)
    except OSError:
        if old.exists():
            os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)
