"""Batches of token windows, read while a model trains: grain over a token folder."""

from collections.abc import Iterator

import jax
import numpy as np

from celo2.tasks.extra import import_extra
from celo2.tasks.stream import Part, Split, Stream, closing, rows_of_part
from celo2.tasks.text import Corpus
from celo2.tasks.tokens import TokenFolder, Tokens, join, read

THREADS, AHEAD = 2, 8  # threads that read, and the batches they may be ahead


class Windows:
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
        return read(self.tokens, index * self.length, self.length + 1)


def stream(text: TokenFolder | Corpus, length: int, batch: int) -> Stream:
    """Batches of windows, int32 [batch, length + 1].

    Training: every window once per epoch, in an order drawn anew for each epoch from the seed; a
    batch may begin in one epoch and end in the next. Validation: the windows in order, whatever
    the seed, and again from the first after the last. Any batch is reached without reading those
    before it. Part p of n has rows p, p + n, p + 2n … of the batch that one process reads.
    """
    grain = import_extra("grain")
    windows = {
        "train": Windows(_as_tokens(text.train, text.vocab), length),
        "valid": Windows(_as_tokens(text.valid, text.vocab), length),
    }
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)

    def batches(split: Split, seed: int, first: int, part: Part) -> Iterator[np.ndarray]:
        rows = rows_of_part(batch, first, part)
        found = grain.MapDataset.source(windows[split])
        if split == "train":
            found = found.seed(seed).shuffle()
        found = found.repeat()[part.index :: part.count]
        # There is no remainder of an endless row, and without this, rows of 1 overflow its length.
        found = found.batch(rows, drop_remainder=True)[first:]
        return closing(iter(found.to_iter_dataset(options)))

    example = jax.ShapeDtypeStruct((batch, length + 1), np.int32)
    return Stream(batches, example, text.checksum())


def _as_tokens(tokens: Tokens | np.ndarray, vocab: int) -> Tokens:
    return tokens if isinstance(tokens, Tokens) else join([tokens], vocab)
