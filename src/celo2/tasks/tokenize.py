"""Makes token folders: documents in, files of token numbers out."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

import numpy as np

from celo2.tasks.datafiles import import_extra, is_compressed, open_text
from celo2.tasks.download import hub_access
from celo2.tasks.task import Split
from celo2.tasks.tokens import (
    FORMAT,
    MANIFEST,
    SPLITS,
    VERSION,
    TokenFile,
    TokenFolder,
    read_token_folder,
    token_dtype,
)

HUB = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
SUBSET = "sample-10BT"
PIECE = 16_384  # characters of a text file taken together
# What the usual vocabularies call the token at the end of a document.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
SHARD = 100_000_000  # tokens of a file
VALID_EVERY = 100
BATCH_CHARACTERS, BATCH_DOCUMENTS = 4_000_000, 1000  # encoded at a time
OFFLINE_TOKENS = (
    "or take text files and --tokenizer bytes (or the path of a tokenizer.json), which need no "
    "network"
)


# Documents: text files, JSON lines, FineWeb.


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


def describe_sources(sources: Sequence[str], subset: str = SUBSET) -> str:
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
    name = path.stem if is_compressed(path) else path.name
    reads_lines = name.lower().endswith(".jsonl")
    try:
        with open_text(path, "rt", encoding="utf-8", newline="") as file:
            yield from _read_json_lines(path, file, field) if reads_lines else _read_pieces(file)
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not text in UTF-8: {error}.") from error


def _read_pieces(file: TextIO) -> Iterator[Document]:
    piece = _read_piece(file)
    while piece:
        following = _read_piece(file)
        yield Document(piece, ends=not following)
        piece = following


def _read_piece(file: TextIO) -> str:
    return file.read(PIECE) + file.readline(PIECE)


def _read_json_lines(path: Path, file: TextIO, field: str) -> Iterator[Document]:
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
    datasets = import_extra("datasets")
    with hub_access(f"{repository} ({subset})", OFFLINE_TOKENS):
        for row in datasets.load_dataset(repository, subset, split="train", streaming=True):
            if row["text"].strip():
                yield Document(row["text"])


# Tokenizers: bytes, a tokenizer.json, or a repository of the Hugging Face hub.


class Tokenizer(NamedTuple):
    """How texts become token numbers below `vocab`."""

    name: str
    vocab: int
    end_of_text: int
    encode: Callable[[list[str]], list[Any]]  # texts -> the tokens of each


def load_tokenizer(name: str = "gpt2", end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer called `name`.

    Args:
        name: "bytes" (UTF-8, ended by a zero byte), the path of a tokenizer.json, or a repository
            of the Hugging Face hub, such as gpt2.
        end_of_text: the token that ends a document, where it is none of the usual names.

    >>> load_tokenizer("bytes").encode(["Ab"])
    [array([65, 98], dtype=uint8)]
    """
    if name == "bytes":
        return Tokenizer(name, 256, 0, lambda texts: [_bytes(text) for text in texts])
    is_file = name.endswith(".json") or Path(name).is_file()
    found = _load_tokenizer_file(Path(name)) if is_file else _load_hub_tokenizer(name)
    # The text is data: it must be neither cut nor filled up, and no word in it is a command.
    found.no_truncation()
    found.no_padding()
    found.encode_special_tokens = True
    numbers: dict[str, int] = found.get_vocab(with_added_tokens=True)
    ends = (end_of_text,) if end_of_text else END_OF_TEXT
    end = next((numbers[token] for token in ends if token in numbers), None)
    if end is None:
        raise ValueError(
            f"The tokenizer {name!r} has no token {', '.join(ends)}: say with --end-of-text which "
            "one ends a document."
        )

    def encode(texts: list[str]) -> list[Any]:
        # In as many threads as there are cores, unless TOKENIZERS_PARALLELISM says otherwise.
        return [row.ids for row in found.encode_batch_fast(texts, add_special_tokens=False)]

    shown = Path(name).name if is_file else name
    return Tokenizer(shown, max(numbers.values()) + 1, end, encode)


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def _load_tokenizer_file(path: Path) -> Any:
    library = import_extra("tokenizers")
    if not path.is_file():
        raise FileNotFoundError(f"There is no tokenizer file {str(path)!r}.")
    try:
        return library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{str(path)!r} is not a tokenizer's file: {error}.") from error


def _load_hub_tokenizer(name: str) -> Any:
    library = import_extra("tokenizers")
    with hub_access(f"The tokenizer {name!r}", OFFLINE_TOKENS):
        return library.Tokenizer.from_pretrained(name)


# Making a folder.


class TokenProgress(NamedTuple):
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
    report: Callable[[TokenProgress], None] = lambda progress: None,
) -> TokenFolder:
    """Makes the token folder `out` and returns it: whole, or not at all.

    Documents 0, `valid_every`, 2 · `valid_every` … are for validation, the others for training.

    Args:
        out: the folder, which must not exist yet.
        sources: what to read: see `read_documents`, as for the next two.
        subset: of a dataset on the hub.
        field: of a JSON line, the one that holds its text.
        tokenizer: bytes, a file or a name on the hub: see `load_tokenizer`.
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
    check_sources(names)
    chosen = load_tokenizer(tokenizer, end_of_text)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
    writers = {split: _Writer(temporary, split, shard) for split in SPLITS}
    try:
        temporary.mkdir()
        found = read_documents(names, subset, field)
        counts = _write_documents(found, chosen, writers, limit, valid_every, report)
        files = {split: writer.finish() for split, writer in writers.items()}
        _check_splits(files, sum(counts.values()))
        source = describe_sources(names, subset)
        # Last, so that a folder without all its files does not read as one.
        manifest = _manifest(source, chosen, files, counts)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        _move_into_place(temporary, out, force)
    finally:
        for writer in writers.values():
            writer.finish()
        shutil.rmtree(temporary, ignore_errors=True)
    return read_token_folder(out)


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


def _write_documents(
    found: Iterable[Document],
    tokenizer: Tokenizer,
    writers: dict[str, "_Writer"],
    limit: int | None,
    valid_every: int,
    report: Callable[[TokenProgress], None],
) -> dict[str, int]:
    """Writes the documents until there are no more, or `limit` tokens; how many each split got."""
    counts: dict[str, int] = dict.fromkeys(SPLITS, 0)
    tokens = 0
    for number, row in enumerate(_encode(found, tokenizer)):
        split = "train" if number % valid_every else "valid"
        writers[split].write(row)
        counts[split] += 1
        tokens += len(row)
        report(TokenProgress(number + 1, tokens, limit))
        if limit is not None and tokens >= limit:
            break
    return counts


def _encode(found: Iterable[Document], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    dtype = token_dtype(tokenizer.vocab)
    end = dtype.type(tokenizer.end_of_text)
    for batch in _document_batches(found):
        rows = tokenizer.encode([document.text for document in batch])
        for document, row in zip(batch, rows, strict=True):
            row = np.asarray(row, dtype)
            yield np.append(row, end) if document.ends else row


def _document_batches(found: Iterable[Document]) -> Iterator[list[Document]]:
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


def _move_into_place(temporary: Path, out: Path, force: bool) -> None:
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
