"""Token folders: a text as files of token numbers, written once and read during training.

A folder holds `tokens.json` and files such as `train-00000.bin`: token after token, little-endian,
two bytes each, or four where the vocabulary has more than 65,536. docs/data.md has an example.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO, get_args

import jax
import numpy as np

from celo2.rulefile import import_extra
from celo2.tasks.datafiles import (
    data_folder,
    hub_access,
    is_compressed,
    open_text,
)
from celo2.tasks.networks import GATHERED, LMConfig, init_lm, lm_loss
from celo2.tasks.task import Part, Split, Stream, Task, read_batches
from celo2.tasks.text import PYTHON_DOCS, TEXTS

MANIFEST = "tokens.json"
FORMAT, VERSION = "celo2-tokens", 1
SPLITS: tuple[Split, ...] = get_args(Split)
THREADS, AHEAD = 2, 8  # threads that read, and the batches they may be ahead
VOCAB_STEP = 128  # a model's vocabulary is rounded up to a multiple of it

HUB = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
PIECE = 16_384  # characters of a text file that make a document
# What the usual vocabularies call the token at the end of a document.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
BATCH_CHARACTERS, BATCH_DOCUMENTS = 4_000_000, 1000  # encoded at a time
OFFLINE = "or use text files and --tokenizer bytes (or a tokenizer.json), which need no network"


# Reading a folder.


class TokenFile(NamedTuple):
    """A file's entry in the manifest."""

    name: str
    tokens: int
    sha256: str


class Tokens(NamedTuple):
    """Several arrays of tokens as one sequence."""

    arrays: Sequence[np.ndarray]
    vocab: int

    @property
    def total(self) -> int:
        return sum(map(len, self.arrays))


class TokenFolder(NamedTuple):
    """A token folder; `train` and `valid` are memory-mapped."""

    path: Path
    source: str
    tokenizer: str
    vocab: int
    end_of_text: int
    files: dict[str, tuple[TokenFile, ...]]
    train: Tokens
    valid: Tokens

    def checksum(self) -> str:
        """The SHA-256 of the files' SHA-256 in the manifest; the files are not read."""
        names = (f"{split} {file.sha256}\n" for split in SPLITS for file in self.files[split])
        return hashlib.sha256("".join(names).encode()).hexdigest()


def token_dtype(vocab: int) -> np.dtype:
    """The type of a token on disk.

    >>> token_dtype(50_257)
    dtype('uint16')
    """
    return np.dtype("<u2" if vocab <= 2**16 else "<u4")


def token_folder_path(text: Any, data: str | os.PathLike | None = None) -> Path | None:
    """The folder that `text` names, by its path or its name in the data folder; else None."""
    if not isinstance(text, (str, os.PathLike)) or text in (PYTHON_DOCS, *TEXTS):
        return None
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    inside = data_folder(data, must_exist=False) / path
    return inside if (inside / MANIFEST).is_file() else None


def read_token_folder(path: str | os.PathLike) -> TokenFolder:
    """The token folder at `path`; the sizes of its files are checked, not their content."""
    path = Path(path)
    manifest = _read_manifest(path / MANIFEST)
    vocab, files = manifest["vocab"], {}
    for split in SPLITS:
        try:
            entries = manifest["splits"][split]["files"]
            files[split] = tuple(TokenFile(**entry) for entry in entries)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{path / MANIFEST} has no list of {split} files: {error!r}."
            ) from error
    return TokenFolder(
        path=path,
        source=manifest["source"],
        tokenizer=manifest["tokenizer"],
        vocab=vocab,
        end_of_text=manifest["end_of_text"],
        files=files,
        **{
            split: Tokens([_map_file(path, file, vocab) for file in files[split]], vocab)
            for split in SPLITS
        },
    )


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} is not a token folder: it has no {MANIFEST}. `celo2 data tokens` makes "
            "token folders."
        )
    try:
        manifest = json.loads(path.read_text("utf-8"))
        found = manifest["format"], manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the manifest of a token folder: {error!r}.") from error
    if found != (FORMAT, VERSION):
        raise ValueError(
            f"{path} has the format {found[0]!r}, version {found[1]!r}; this celo2 reads "
            f"{FORMAT!r}, version {VERSION}: was it made by a newer one?"
        )
    kinds = {"source": str, "tokenizer": str, "vocab": int, "end_of_text": int, "splits": dict}
    for name, kind in kinds.items():
        if not isinstance(manifest.get(name), kind):
            raise ValueError(
                f"{path} has {name}={manifest.get(name)!r}, not of type {kind.__name__}."
            )
    if manifest.get("dtype") != token_dtype(manifest["vocab"]).name:
        raise ValueError(
            f"{path} has dtype={manifest.get('dtype')!r}, but a vocabulary of "
            f"{manifest['vocab']:,} is stored as {token_dtype(manifest['vocab']).name}."
        )
    return manifest


def _map_file(folder: Path, file: TokenFile, vocab: int) -> np.ndarray:
    path, dtype = folder / file.name, token_dtype(vocab)
    if Path(file.name).name != file.name:
        raise ValueError(f"{folder / MANIFEST} names {file.name!r}, which is not in its folder.")
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no file {file.name!r}, which its {MANIFEST} names.")
    size, expected = path.stat().st_size, file.tokens * dtype.itemsize
    if size != expected or not size:
        raise ValueError(
            f"{path} has {size:,} bytes instead of {expected:,} for {file.tokens:,} tokens: was it "
            "copied completely?"
        )
    # As a plain array, whose slices cost a fraction of a memmap's.
    return np.asarray(np.memmap(path, dtype, mode="r"))


def verify_token_folder(folder: TokenFolder) -> None:
    """Reads every file; raises a ValueError for the first whose SHA-256 is not the manifest's."""
    for file in (file for split in SPLITS for file in folder.files[split]):
        found = _file_digest(folder.path / file.name)
        if found != file.sha256:
            raise ValueError(
                f"{folder.path / file.name} has the SHA-256 {found[:12]}… but {MANIFEST} says "
                f"{file.sha256[:12]}…: the file is damaged or from another folder. Make the folder "
                "again."
            )


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tokens(tokens: Tokens, start: int, count: int) -> np.ndarray:
    """int32 [count]: the tokens from `start` on, which may be in several arrays."""
    parts, stop = [], start + count
    for array in tokens.arrays:
        if start < len(array) and stop > 0:
            parts.append(array[max(start, 0) : stop])
        start, stop = start - len(array), stop - len(array)
    found = np.concatenate(parts).astype(np.int32)
    # The model would silently clamp an index beyond its table.
    if not 0 <= found.min() <= found.max() < tokens.vocab:
        raise ValueError(
            f"There is a token {found.max()} in a vocabulary of {tokens.vocab}: the files are "
            "damaged or were made with another tokenizer."
        )
    return found


# Training on a folder.


def token_stream(folder: TokenFolder, length: int, batch: int) -> Stream:
    """Batches of windows, int32 [batch, length + 1].

    A window begins with the last token of the one before, so each token but the first is predicted
    once. Training: every window once per epoch, shuffled anew for each epoch from the seed; a batch
    may span two epochs. Validation: the windows in order, repeated, whatever the seed. Any batch
    can be read without reading those before it.
    """
    grain = import_extra("grain", "data")
    for split in SPLITS:
        if (count := getattr(folder, split).total) < length + 1:
            raise ValueError(
                f"The {split} text has {count:,} tokens, fewer than one window of {length + 1:,}: "
                "use a longer text, or a model with a shorter context."
            )

    def batches(split: Split, seed: int, first: int, part: Part) -> Iterator[np.ndarray]:
        tokens = getattr(folder, split)
        order = grain.MapDataset.range((tokens.total - 1) // length)
        if split == "train":
            order = order.seed(seed).shuffle()
        windows = order.repeat().map(lambda i: read_tokens(tokens, i * length, length + 1))
        return read_batches(windows, batch, first, part, threads=THREADS, ahead=AHEAD, whole=True)

    example = jax.ShapeDtypeStruct((batch, length + 1), np.int32)
    return Stream(batches, example, folder.checksum())


def streamed_language_model(folder: TokenFolder, config: LMConfig, batch: int) -> Task:
    """Next-token prediction on a token folder, with each window once per epoch.

    The vocabulary is the folder's, rounded up to a multiple of 128.
    """
    vocab = -(-folder.vocab // VOCAB_STEP) * VOCAB_STEP
    if vocab > config.vocab:
        raise ValueError(
            f"{folder.path} has a vocabulary of {folder.vocab:,} ({folder.tokenizer}), and this "
            f"model has {config.vocab:,}: use a larger one, or make the folder with --tokenizer "
            "bytes."
        )
    config = dataclasses.replace(config, vocab=vocab)
    return Task(
        partial(init_lm, config=config),
        lambda data, key, split: data,
        partial(lm_loss, config),
        token_stream(folder, config.length, batch),
        GATHERED,
    )


# Making a folder: how, the documents, the tokenizers, the files.


@dataclass(frozen=True)
class TokenOptions:
    """How a token folder is made.

    Args:
        tokenizer: bytes, the path of a tokenizer.json, or a name on the Hugging Face hub.
        tokens: number of tokens to stop at, training and validation together, such as 600e6; the
            last document is kept whole. None: the whole text.
        subset: subset of FineWeb to read.
        field: field of a JSON line that holds the text.
        end_of_text: token that ends a document; None: the tokenizer's, if it has one of the usual
            names.
        valid_every: use one of so many documents for validation. A text file counts as one document
            for every 16,384 characters.
        shard: maximum number of tokens per file.
    """

    tokenizer: str = "gpt2"
    tokens: float | None = None
    subset: str = "sample-10BT"
    field: str = "text"
    end_of_text: str | None = None
    valid_every: int = 100
    shard: float = 100e6

    def __post_init__(self):
        for name, least in (("tokens", 1), ("valid_every", 2), ("shard", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}.")


# Documents: text files, JSON lines, FineWeb.


class Document(NamedTuple):
    """A text, or a piece of one that is too long for memory; `ends` marks the last piece."""

    text: str
    ends: bool = True


def read_documents(sources: Sequence[str], how: TokenOptions) -> Iterator[Document]:
    """The documents of all sources in order.

    The sources are text files, files of JSON lines (.jsonl), either as .xz or .gz too, or names of
    `HUB`. A text file comes in pieces of about 16,384 characters, cut after a line.
    """
    for source in sources:
        if source in HUB:
            yield from _read_hub(HUB[source], how.subset)
        else:
            yield from _read_file(Path(source), how.field)


def _read_hub(repository: str, subset: str) -> Iterator[Document]:
    datasets = import_extra("datasets", "data")
    with hub_access(f"{repository} ({subset})", OFFLINE):
        for row in datasets.load_dataset(repository, subset, split="train", streaming=True):
            if row["text"].strip():
                yield Document(row["text"])


def _read_file(path: Path, field: str) -> Iterator[Document]:
    name = path.stem if is_compressed(path) else path.name
    try:
        with open_text(path, "rt", encoding="utf-8", newline="") as file:
            if name.lower().endswith(".jsonl"):
                yield from _read_json_lines(path, file, field)
            else:
                yield from _read_pieces(file)
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not text in UTF-8: {error}.") from error


def _read_pieces(file: TextIO) -> Iterator[Document]:
    pieces = iter(lambda: file.read(PIECE) + file.readline(PIECE), "")
    piece = next(pieces, "")
    for following in pieces:
        yield Document(piece, ends=False)
        piece = following
    if piece:
        yield Document(piece)


def _read_json_lines(path: Path, file: TextIO, field: str) -> Iterator[Document]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            # JSON can contain half of a character, which no encoding has.
            text = json.loads(line)[field].encode("utf-8", "replace").decode()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"Line {number} of {str(path)!r} is not a JSON object whose {field!r} is a text: "
                f"{error!r}. Name another field with --field."
            ) from error
        if text.strip():
            yield Document(text)


# Tokenizers: bytes, a tokenizer.json, or a repository on the Hugging Face hub.


class Tokenizer(NamedTuple):
    """A tokenizer; token numbers are below `vocab`."""

    name: str
    vocab: int
    end_of_text: int
    encode: Callable[[list[str]], list[Any]]  # texts -> the tokens of each


def load_tokenizer(name: str = "gpt2", end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer called `name`.

    Args:
        name: "bytes" (UTF-8, ended by a zero byte), the path of a tokenizer.json, or a repository
            of the Hugging Face hub, such as gpt2.
        end_of_text: the token that ends a document, where it has none of the usual names.

    >>> load_tokenizer("bytes").encode(["Ab"])
    [array([65, 98], dtype=uint8)]
    """
    if name == "bytes":
        return Tokenizer(
            name, 256, 0, lambda texts: [np.frombuffer(t.encode(), np.uint8) for t in texts]
        )
    is_file = name.endswith(".json") or Path(name).is_file()
    found = _load_tokenizer_file(Path(name)) if is_file else _load_hub_tokenizer(name)
    # The text is data: it must be neither cut nor padded, and nothing in it is a special token.
    found.no_truncation()
    found.no_padding()
    found.encode_special_tokens = True
    numbers: dict[str, int] = found.get_vocab(with_added_tokens=True)
    ends = (end_of_text,) if end_of_text else END_OF_TEXT
    end = next((numbers[token] for token in ends if token in numbers), None)
    if end is None:
        raise ValueError(
            f"The tokenizer {name!r} has no token {', '.join(ends)}: name the token that ends a "
            "document with --end-of-text."
        )

    def encode(texts: list[str]) -> list[Any]:
        # In as many threads as there are cores, unless TOKENIZERS_PARALLELISM says otherwise.
        return [row.ids for row in found.encode_batch_fast(texts, add_special_tokens=False)]

    shown = Path(name).name if is_file else name
    return Tokenizer(shown, max(numbers.values()) + 1, end, encode)


def _load_tokenizer_file(path: Path) -> Any:
    library = import_extra("tokenizers", "data")
    if not path.is_file():
        raise FileNotFoundError(f"There is no tokenizer file {str(path)!r}.")
    try:
        return library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{str(path)!r} is not a tokenizer file: {error}.") from error


def _load_hub_tokenizer(name: str) -> Any:
    library = import_extra("tokenizers", "data")
    with hub_access(f"The tokenizer {name!r}", OFFLINE):
        return library.Tokenizer.from_pretrained(name)


def make_tokens(
    out: str | os.PathLike,
    sources: Sequence[str | os.PathLike],
    *,
    force: bool = False,
    report: Callable[[int, int], None] = lambda documents, tokens: None,
    **options: Any,
) -> TokenFolder:
    """Makes the token folder `out`, completely or not at all, and returns it.

    Documents 0, `valid_every`, 2 · `valid_every` … are for validation, the others for training.

    Args:
        out: the folder, which must not exist yet.
        sources: what to read: see `read_documents`.
        force: replace a token folder that exists already.
        report: called with the documents and tokens so far, every few megabytes of text.
        options: fields of TokenOptions.
    """
    how = TokenOptions(**options)
    out, names = Path(out).expanduser().resolve(), [os.fspath(source) for source in sources]
    _check_free(out, force)
    _check_sources(names)
    chosen = load_tokenizer(how.tokenizer, how.end_of_text)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (out.with_name(f".{out.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    try:
        temporary.mkdir()
        documents = read_documents(names, how)
        splits = _write_documents(temporary, documents, chosen, how, report)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "source": ", ".join(
                f"{HUB[s]} {how.subset}" if s in HUB else Path(s).name for s in names
            ),
            "tokenizer": chosen.name,
            "vocab": chosen.vocab,
            "end_of_text": chosen.end_of_text,
            "dtype": token_dtype(chosen.vocab).name,
            "splits": splits,
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
        if force and out.exists():
            os.rename(out, old)
        os.rename(temporary, out)  # fails if another process has made the folder by now
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return read_token_folder(out)


def _check_free(out: Path, force: bool) -> None:
    if out.exists() and not force:
        raise FileExistsError(f"{out} exists already: name another folder, or use --force.")
    if out.exists() and not (out / MANIFEST).is_file():
        raise FileExistsError(f"{out} is not a token folder, and --force replaces nothing else.")


def _check_sources(sources: Sequence[str]) -> None:
    if not sources:
        raise ValueError(f"Nothing to read: name files or one of {', '.join(HUB)} with --from.")
    for source in sources:
        if source not in HUB and not Path(source).is_file():
            raise FileNotFoundError(f"{source!r} is neither a file nor one of {', '.join(HUB)}.")


def _write_documents(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    how: TokenOptions,
    report: Callable[[int, int], None],
) -> dict[str, dict[str, Any]]:
    """Writes tokens until there are enough, or no more; returns the manifest's `splits`."""
    dtype, shard = token_dtype(tokenizer.vocab), int(how.shard)
    most = math.inf if how.tokens is None else int(how.tokens)
    counts, tokens = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    for batch in _document_batches(documents):
        rows: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        encoded = tokenizer.encode([document.text for document in batch])
        for document, row in zip(batch, encoded, strict=True):
            if sum(tokens.values()) >= most:
                break
            split = "train" if sum(counts.values()) % how.valid_every else "valid"
            end = np.asarray([tokenizer.end_of_text] if document.ends else [], dtype)
            rows[split].append(np.append(np.asarray(row, dtype), end))
            counts[split] += 1
            tokens[split] += len(rows[split][-1])
        for split in SPLITS:
            new = np.concatenate([np.zeros(0, dtype), *rows[split]])
            _append(folder, split, tokens[split] - len(new), new, shard)
        report(sum(counts.values()), sum(tokens.values()))
        if sum(tokens.values()) >= most:
            break
    for split in SPLITS:
        if not tokens[split]:
            raise ValueError(
                f"The text has {sum(counts.values())} documents (a text file has one for every "
                f"{PIECE:,} characters), too few for any to be for {split}: use a longer text."
            )
    return {
        split: {
            "tokens": tokens[split],
            "documents": counts[split],
            "files": _list_files(folder, split, -(-tokens[split] // shard), dtype.itemsize),
        }
        for split in SPLITS
    }


def _document_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _file_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def _append(folder: Path, split: str, start: int, tokens: np.ndarray, shard: int) -> None:
    """Appends tokens to the split, of which `start` are written already, `shard` to a file."""
    while len(tokens):
        number, inside = divmod(start, shard)
        now, tokens = np.split(tokens, [shard - inside])
        with open(folder / _file_name(split, number), "ab") as file:
            file.write(now.data)
        start += len(now)


def _list_files(folder: Path, split: str, count: int, itemsize: int) -> list[dict[str, Any]]:
    paths = [folder / _file_name(split, number) for number in range(count)]
    files = (TokenFile(p.name, p.stat().st_size // itemsize, _file_digest(p)) for p in paths)
    return [file._asdict() for file in files]
