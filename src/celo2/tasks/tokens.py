"""Token folders: a text as files of token numbers, read from disk while a model trains on it.

A folder holds `tokens.json` and files such as `train-00000.bin`: token after token, little-endian,
two bytes each, or four where the vocabulary has more than 65,536. docs/data.md has an example.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import numpy as np

from celo2.tasks.datafiles import cache_folder, import_extra, named_folder
from celo2.tasks.networks import GATHERED, LMConfig, init_lm, lm_loss
from celo2.tasks.task import Part, Split, Stream, Task, read_batches
from celo2.tasks.text import PYTHON_DOCS, TEXTS

MANIFEST = "tokens.json"
FORMAT, VERSION = "celo2-tokens", 1
SPLITS: tuple[Split, ...] = get_args(Split)
THREADS, AHEAD = 2, 8  # threads that read, and the batches they may be ahead
VOCAB_STEP = 128  # a model's vocabulary is rounded up to a multiple of it


class TokenFile(NamedTuple):
    """What the manifest says of a file."""

    name: str
    tokens: int
    sha256: str


class Tokens(NamedTuple):
    """Several arrays of tokens as one sequence of `count`."""

    arrays: tuple[np.ndarray, ...]
    starts: tuple[int, ...]  # of each array within the sequence
    count: int
    vocab: int


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
        """The SHA-256 of the files' SHA-256, as the manifest has them: nothing is read."""
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
    inside = (named_folder(data) or cache_folder()) / path
    return inside if (inside / MANIFEST).is_file() else None


def read_token_folder(path: str | os.PathLike) -> TokenFolder:
    """The token folder at `path`; sizes of files are checked, not their content."""
    path = Path(path)
    manifest = _read_manifest(path / MANIFEST)
    vocab = manifest["vocab"]
    files = {split: _list_files(path, manifest, split) for split in SPLITS}
    return TokenFolder(
        path=path,
        source=manifest["source"],
        tokenizer=manifest["tokenizer"],
        vocab=vocab,
        end_of_text=manifest["end_of_text"],
        files=files,
        **{
            split: join_tokens([_map_file(path, file, vocab) for file in files[split]], vocab)
            for split in SPLITS
        },
    )


def verify_token_folder(folder: TokenFolder) -> None:
    """Reads every file; a ValueError for the first that is not the one that was written."""
    for split in SPLITS:
        for file in folder.files[split]:
            with open(folder.path / file.name, "rb") as opened:
                found = hashlib.file_digest(opened, "sha256").hexdigest()
            if found != file.sha256:
                raise ValueError(
                    f"{folder.path / file.name} has the SHA-256 {found[:12]}… but {MANIFEST} says "
                    f"{file.sha256[:12]}…: it is damaged or another's. Make the folder again."
                )


def join_tokens(arrays: Sequence[np.ndarray], vocab: int) -> Tokens:
    """The arrays as one sequence."""
    ends = np.cumsum([0, *map(len, arrays)]).tolist()
    return Tokens(tuple(arrays), tuple(ends[:-1]), ends[-1], vocab)


def read_tokens(tokens: Tokens, start: int, count: int) -> np.ndarray:
    """int32 [count]: the tokens from `start` on, from as many files as they lie in."""
    stop = start + count
    if not 0 <= start <= stop <= tokens.count:
        raise IndexError(f"tokens {start} to {stop} are not within the {tokens.count} there are.")
    parts = [
        array[max(start - first, 0) : stop - first]
        for array, first in zip(tokens.arrays, tokens.starts, strict=True)
        if first < stop and start < first + len(array)
    ]
    found = np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)
    # An index beyond the table would be clamped in silence by the model.
    if count and not 0 <= found.min() <= found.max() < tokens.vocab:
        raise ValueError(
            f"There is a token {found.max()} between {start} and {stop}, but the vocabulary has "
            f"{tokens.vocab}: the files are damaged or of another vocabulary."
        )
    return found


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} is no token folder: it has no {MANIFEST}. `celo2 data tokens` makes "
            "such folders."
        )
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable as JSON: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is not the manifest of a token folder: no format {FORMAT!r}.")
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {manifest.get('version')!r} of the format, and this celo2 reads "
            f"{VERSION}: was it made by a newer one?"
        )
    kinds = {"source": str, "tokenizer": str, "vocab": int, "end_of_text": int, "splits": dict}
    for name, kind in kinds.items():
        if not isinstance(manifest.get(name), kind):
            raise ValueError(
                f"{path} has {name}={manifest.get(name)!r}, not of type {kind.__name__}."
            )
    if manifest.get("dtype") != token_dtype(manifest["vocab"]).name:
        raise ValueError(
            f"{path} has dtype={manifest.get('dtype')!r}; a vocabulary of {manifest['vocab']:,} is "
            f"kept as {token_dtype(manifest['vocab']).name}."
        )
    return manifest


def _list_files(path: Path, manifest: dict[str, Any], split: Split) -> tuple[TokenFile, ...]:
    try:
        entries = manifest["splits"][split]
        files = tuple(
            TokenFile(str(f["name"]), int(f["tokens"]), str(f["sha256"])) for f in entries["files"]
        )
        total = entries["tokens"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path / MANIFEST} does not list the files of {split}: {error!r}."
        ) from error
    for file in files:
        if file.name in ("", "..") or Path(file.name).name != file.name:
            raise ValueError(f"{path / MANIFEST} names {file.name!r}, which is not in its folder.")
    if not files or total != sum(file.tokens for file in files):
        raise ValueError(
            f"{path / MANIFEST} says {split} has {total} tokens, and its files have "
            f"{sum(file.tokens for file in files)}."
        )
    return files


def _map_file(folder: Path, file: TokenFile, vocab: int) -> np.ndarray:
    path, dtype = folder / file.name, token_dtype(vocab)
    if not path.is_file():
        raise FileNotFoundError(f"{folder} lacks {file.name}, which its {MANIFEST} names.")
    size, due = path.stat().st_size, file.tokens * dtype.itemsize
    if size != due or not due:
        raise ValueError(
            f"{path} has {size:,} bytes in place of the {due:,} of {file.tokens:,} tokens: was it "
            "copied to its end?"
        )
    # As a plain array, whose slices cost a fraction of a memmap's.
    return np.asarray(np.memmap(path, dtype, mode="r"))


class TokenWindows:
    """The windows of a text: number i has `length` + 1 tokens, and the next begins with its last.

    So each token but the first is predicted once.
    """

    def __init__(self, tokens: Tokens, length: int):
        if tokens.count < length + 1:
            raise ValueError(
                f"The text has {tokens.count:,} tokens, fewer than one window of {length + 1:,}: "
                "give a longer text, or a model with a shorter context."
            )
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return (self.tokens.count - 1) // self.length

    def __getitem__(self, index: int) -> np.ndarray:
        return read_tokens(self.tokens, index * self.length, self.length + 1)


def token_stream(folder: TokenFolder, length: int, batch: int) -> Stream:
    """Batches of windows, int32 [batch, length + 1].

    Training: every window once per epoch, in an order drawn anew for each epoch from the seed; a
    batch may begin in one epoch and end in the next. Validation: the windows in order, whatever
    the seed, and again from the first after the last. Any batch is reached without reading those
    before it.
    """
    grain = import_extra("grain")
    windows = {split: TokenWindows(getattr(folder, split), length) for split in SPLITS}

    def batches(split: Split, seed: int, first: int, part: Part) -> Iterator[np.ndarray]:
        order = grain.MapDataset.source(windows[split])
        if split == "train":
            order = order.seed(seed).shuffle()
        return read_batches(
            order.repeat(), batch, first, part, threads=THREADS, ahead=AHEAD, whole=True
        )

    example = jax.ShapeDtypeStruct((batch, length + 1), np.int32)
    return Stream(batches, example, folder.checksum())


def streamed_language_model(folder: TokenFolder, config: LMConfig, batch: int) -> Task:
    """Next-token prediction on a token folder, each of whose windows comes once per epoch.

    The vocabulary is the folder's, rounded up to a multiple of 128.
    """
    vocab = -(-folder.vocab // VOCAB_STEP) * VOCAB_STEP
    if vocab > config.vocab:
        raise ValueError(
            f"{folder.path} has a vocabulary of {folder.vocab:,} ({folder.tokenizer}), and this "
            f"model has {config.vocab:,}: take a larger one, or make the folder with --tokenizer "
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
