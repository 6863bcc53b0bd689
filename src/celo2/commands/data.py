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
    """Download datasets from the Hugging Face hub: image sets, shrunk to 8×8, or Wikipedia's text.

    Args:
        datasets: which of mnist, fashion_mnist, cifar10, svhn, wikipedia; by default the four
            image sets.
        names: the same, as an option.
        data: the folder to write to; by default CELO2_DATA, else the cache folder.
        full: also keep the images at full size.
        force: download again what exists already.
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
    """Make a token folder, for the option --text of a language model.

    Args:
        out: the folder to make.
        options: how.
        from_: text files or files of JSON lines (.jsonl), either as .xz or .gz too; or fineweb or
            fineweb-edu, streamed from the Hugging Face hub.
        force: replace a token folder that exists already.
    """
    with progress_bar(options.tokens, " tokens", unit_scale=True, delay=DELAY) as bar:

        def report(documents: int, count: int) -> None:
            bar.set_postfix_str(f"{documents:,} documents", refresh=False)
            bar.update(count - bar.n)

        folder = make_tokens(out, from_, force=force, report=report, **vars(options))
    print(describe_folder(folder))


def check_tokens(folder: str) -> None:
    """Read a token folder and compare its files with the checksums they were written with.

    Args:
        folder: one that `celo2 data tokens` made.
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
