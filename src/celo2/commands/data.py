"""`celo2 data`: fetch datasets, make token folders, check them."""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import tyro

from celo2.commands.progress import Flat, progress_bar
from celo2.tasks.download import ARTICLES, compare_with_records, fetch
from celo2.tasks.images import IMAGE_SETS
from celo2.tasks.tokens import (
    SPLITS,
    TokenFolder,
    TokenOptions,
    make_tokens,
    read_token_folder,
    verify_token_folder,
)

Sources = Annotated[tuple[str, ...], tyro.conf.arg(name="from")]  # `from` is a word of Python's

DELAY = 1.0  # seconds without a bar, which what fails at once does not need


def data(arguments: Sequence[str]) -> int:
    """Runs one of COMMANDS."""
    positional = (tyro.conf.PositionalRequiredArgs,)
    tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="celo2 data", args=arguments, config=positional
    )
    return 0


def fetch_datasets(
    datasets: tyro.conf.Positional[tuple[str, ...]] = (),
    names: tuple[str, ...] = (),
    data: str | None = None,
    full: bool = False,
    force: bool = False,
) -> None:
    """Download image sets (as 8×8 grey images) or Wikipedia's text from the Hugging Face hub.

    Args:
        datasets: datasets to download: mnist, fashion_mnist, cifar10, svhn, wikipedia.
            If none is given, the four image sets.
        names: the same names, as an option.
        data: folder to write to; None: CELO2_DATA if that is set, else the cache folder.
        full: also keep the images at full size.
        force: download files again that exist already.
    """
    chosen = (*datasets, *names) or IMAGE_SETS
    report = partial(print, file=sys.stderr)
    for name, digest in fetch(data, chosen, full=full, force=force, report=report).items():
        print(f"{name:<26} sha256 {digest}")
    if ARTICLES in chosen:
        print(compare_with_records(data))


def make_token_folder(
    out: str,
    options: Annotated[TokenOptions, Flat],
    from_: Sources = (),
    force: bool = False,
) -> None:
    """Make a token folder, which --text of a language model reads.

    Args:
        out: folder to make.
        options: tokenizer, number of tokens and splits.
        from_: text files or JSON-lines files (.jsonl), also compressed as .xz or .gz;
            or fineweb or fineweb-edu, which are streamed from the Hugging Face hub.
        force: replace an existing token folder.
    """
    with progress_bar(options.tokens, " tokens", unit_scale=True, delay=DELAY) as bar:

        def report(documents: int, count: int) -> None:
            bar.set_postfix_str(f"{documents:,} documents", refresh=False)
            bar.update(count - bar.n)

        folder = make_tokens(out, from_, force=force, report=report, **vars(options))
    print(describe_folder(folder))


def check_tokens(folder: str) -> None:
    """Compare the files of a token folder with the checksums it was written with.

    Args:
        folder: token folder to check, made by `celo2 data tokens`.
    """
    found = read_token_folder(folder)
    verify_token_folder(found)
    print(describe_folder(found))


COMMANDS = {"fetch": fetch_datasets, "tokens": make_token_folder, "check": check_tokens}


def describe_folder(folder: TokenFolder) -> str:
    """A token folder in lines."""
    counts = ", ".join(f"{getattr(folder, split).total:,} for {split}" for split in SPLITS)
    return "\n".join(
        (
            f"{folder.path}: {counts}",
            f"{folder.tokenizer}, vocabulary {folder.vocab:,}, from {folder.source}",
            f"sha256 {folder.checksum()}",
        )
    )
