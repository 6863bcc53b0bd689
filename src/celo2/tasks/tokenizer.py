"""Tokenizers: bytes, a tokenizer.json, or a repository of the Hugging Face hub."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from celo2.tasks.documents import reach_hub
from celo2.tasks.extra import import_extra
from celo2.tasks.fetch import FetchError, is_offline

# What the usual vocabularies call the token at the end of a document.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


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
    found = _load_file(Path(name)) if is_file else _load_hub(name)
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


def _load_file(path: Path) -> Any:
    library = import_extra("tokenizers")
    if not path.is_file():
        raise FileNotFoundError(f"There is no tokenizer file {str(path)!r}.")
    try:
        return library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{str(path)!r} is not a tokenizer's file: {error}.") from error


def _load_hub(name: str) -> Any:
    library = import_extra("tokenizers")
    reach_hub(f"The tokenizer {name!r} is read from the Hugging Face hub")
    try:
        return library.Tokenizer.from_pretrained(name)
    except Exception as error:  # of the hub's client, or bare ones of the library
        hint = "HF_HUB_OFFLINE is set and its cache may lack it; " if is_offline() else ""
        raise FetchError(
            f"The tokenizer {name!r} could not be read: {hint}{type(error).__name__}: {error} "
            "--tokenizer bytes needs no network."
        ) from error
