"""Texts as bytes on the device, and the task of training a language model on them."""

import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from celo2.tasks.datafiles import ENVIRONMENT, array_checksum, data_folder, open_text
from celo2.tasks.networks import GATHERED, LMConfig, init_lm, lm_loss
from celo2.tasks.task import Task

PYTHON_DOCS = "python-docs"
WIKIPEDIA = "wikipedia_en"
TEXTS = ("tinyshakespeare", WIKIPEDIA)  # in the data folder
BYTES = 256
VALID_FRACTION = 0.1


class Corpus(NamedTuple):
    """A text as tokens for training and for validation; bytes are uint8."""

    name: str
    source: str  # the files it was read from, or the module that embeds it
    train: np.ndarray
    valid: np.ndarray
    vocab: int

    def checksum(self) -> str:
        """The SHA-256 of the tokens' bytes, train then valid."""
        return array_checksum((self.train, self.valid))


def load_text(
    text: str | os.PathLike | Sequence[str | os.PathLike] = PYTHON_DOCS,
    data: str | os.PathLike | None = None,
) -> Corpus:
    """The corpus called `text`, as bytes.

    Args:
        text: "python-docs" (the standard library's help topics, needs no file), tinyshakespeare
            or wikipedia_en of the data folder, or one or more text files (.xz or .gz too), which
            are joined and whose last tenth is for validation.
        data: the folder; by default CELO2_DATA, else the cache folder.

    >>> load_text("python-docs").vocab
    256
    """
    if isinstance(text, str) and text == PYTHON_DOCS:
        return _split_corpus(PYTHON_DOCS, "pydoc_data.topics", _python_docs())
    if isinstance(text, str) and text in TEXTS:
        return _load_from_folder(text, data_folder(data))
    paths = [Path(p) for p in ([text] if isinstance(text, (str, os.PathLike)) else text)]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"{str(path)!r} is neither a file nor one of {', '.join((PYTHON_DOCS, *TEXTS))}, "
                "nor a token folder such as `celo2 data tokens` makes."
            )
    source = ", ".join(map(str, paths))
    return _split_corpus(source, source, np.concatenate([_read_bytes(path) for path in paths]))


def blank_text(vocab: int, length: int) -> Corpus:
    """A corpus of one window of zeros, to get a model's shapes without data."""
    tokens = np.zeros(length, np.uint8 if vocab <= BYTES else np.uint16)
    return Corpus("blank", "nowhere", tokens, tokens, vocab)


def text_files(name: str, folder: Path) -> list[Path]:
    """The two files of a text in the data folder, for training and for validation."""
    return [folder / f"{name}_{split}.txt.xz" for split in ("train", "val")]


def reduce_vocabulary(corpus: Corpus, vocab: int) -> Corpus:
    """The corpus with its most frequent tokens numbered 0, 1, …, and one number for all others.

    >>> small = reduce_vocabulary(load_text("python-docs"), 64)
    >>> small.vocab, int(small.train.max())
    (64, 63)
    """
    counts = np.bincount(corpus.train, minlength=corpus.vocab)
    table = np.full(corpus.vocab, vocab - 1, corpus.train.dtype)
    table[np.argsort(-counts, kind="stable")[: vocab - 1]] = np.arange(vocab - 1)
    return corpus._replace(train=table[corpus.train], valid=table[corpus.valid], vocab=vocab)


def sample_windows(tokens: Array, key: Array, batch: int, length: int) -> Array:
    """int32 [batch, length]: runs of tokens from random places of a device array."""
    if len(tokens) < length:
        raise ValueError(
            f"The text has {len(tokens)} tokens, fewer than one window of {length}: give a longer "
            "text, or a model with a shorter context."
        )
    starts = jax.random.randint(key, (batch,), 0, len(tokens) - length + 1)
    cut = jax.vmap(lambda start: jax.lax.dynamic_slice(tokens, (start,), (length,)))
    return cut(starts).astype(jnp.int32)


def language_model(corpus: Corpus, config: LMConfig, batch: int) -> Task:
    """Next-token prediction on random windows of the corpus; the loss is in nats per token.

    A byte corpus needs fewer tokens than the config may have: the vocabulary is the corpus's.
    """
    config = dataclasses.replace(config, vocab=corpus.vocab)

    def sample(data, key, split):
        return sample_windows(data[split], key, batch, config.length + 1)

    data = {"train": jnp.asarray(corpus.train), "valid": jnp.asarray(corpus.valid)}
    return Task(partial(init_lm, config=config), sample, partial(lm_loss, config), data, GATHERED)


def _python_docs() -> np.ndarray:
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), np.uint8)


def _load_from_folder(name: str, folder: Path) -> Corpus:
    paths = text_files(name, folder)
    for path in paths:
        if not path.is_file():
            made = "make one with `celo2 data fetch wikipedia`, or " if name == WIKIPEDIA else ""
            raise FileNotFoundError(
                f"{name} needs the file {path.name}, which is not in {folder}. Point {ENVIRONMENT} "
                f"to a folder that holds it, or {made}name a text file of your own, or use the "
                f"embedded text {PYTHON_DOCS!r}."
            )
    train, valid = map(_read_bytes, paths)
    return Corpus(name, ", ".join(map(str, paths)), train, valid, BYTES)


def _read_bytes(path: Path) -> np.ndarray:
    with open_text(path) as file:
        return np.frombuffer(file.read(), np.uint8)


def _split_corpus(name: str, source: str, tokens: np.ndarray) -> Corpus:
    cut = len(tokens) - int(VALID_FRACTION * len(tokens))
    return Corpus(name, source, tokens[:cut], tokens[cut:], BYTES)
