"""`celo2 data`: fetch datasets, make token folders, check them."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import tyro

from celo2.tasks.download import (
    ARTICLES,
    FetchProgress,
    compare_with_records,
    fetch,
)
from celo2.tasks.images import IMAGE_SETS
from celo2.tasks.tokenize import SHARD, SUBSET, VALID_EVERY, TokenProgress, make_tokens
from celo2.tasks.tokens import SPLITS, TokenFolder, read_token_folder, verify_token_folder

Sources = Annotated[tuple[str, ...], tyro.conf.arg(name="from")]  # `from` is a word of Python's
QUIET = 60  # seconds between lines of progress where there is no terminal


def main(arguments: Sequence[str]) -> int:
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
        data: where to; by default CELO2_DATA, else the cache folder, where they are looked for.
        full: keep the images at full size too.
        force: download again what is there already.
    """
    chosen = (*datasets, *names) or IMAGE_SETS
    digests = fetch(data, chosen, full=full, force=force, report=show_fetch_progress)
    for name, digest in digests.items():
        print(f"{name:<26} sha256 {digest}")
    if ARTICLES in chosen:
        print(compare_with_records(data))


def make_token_folder(
    out: str,
    from_: Sources = (),
    tokenizer: str = "gpt2",
    tokens: float | None = None,
    subset: str = SUBSET,
    field: str = "text",
    end_of_text: str | None = None,
    valid_every: int = VALID_EVERY,
    shard: float = SHARD,
    force: bool = False,
) -> None:
    """Make a token folder, for the option --text of a language model.

    Args:
        out: the folder to make.
        from_: text files or files of JSON lines (.jsonl), either as .xz or .gz too; or fineweb or
            fineweb-edu, streamed from the Hugging Face hub.
        tokenizer: bytes, the path of a tokenizer.json, or a name on the hub.
        tokens: stop after so many, such as 600e6; by default at the end of the text.
        subset: of FineWeb.
        field: the field of a JSON line that holds its text.
        end_of_text: the token that ends a document, if it is none of the usual names.
        valid_every: one document in so many is for validation. A text file counts as one for every
            16,384 characters.
        shard: tokens of a file, at most.
        force: replace a token folder that is there already.
    """
    folder = make_tokens(
        out,
        from_,
        tokenizer=tokenizer,
        end_of_text=end_of_text,
        subset=subset,
        field=field,
        limit=None if tokens is None else int(tokens),
        valid_every=valid_every,
        shard=int(shard),
        force=force,
        report=token_progress(),
    )
    if sys.stderr.isatty():
        print(file=sys.stderr)  # the line of progress is complete
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


def show_fetch_progress(progress: FetchProgress) -> None:
    """One line per dataset, rewritten as it goes on."""
    terminal = sys.stderr.isatty()
    if progress.state == "converting":
        if terminal:
            done = f"{progress.done:,} of {progress.total:,}"
            print(f"\r{progress.name:<14} {done}", end="", file=sys.stderr, flush=True)
        return
    start = "\r\x1b[K" if terminal else ""
    print(f"{start}{progress.name:<14} {progress.state}", file=sys.stderr)


def token_progress() -> Callable[[TokenProgress], None]:
    """What shows the progress of a token folder, in a line that is rewritten."""
    start = shown = time.monotonic()

    def report(progress: TokenProgress) -> None:
        nonlocal shown
        terminal, now = sys.stderr.isatty(), time.monotonic()
        done = progress.limit is not None and progress.tokens >= progress.limit
        if now - shown < (0.2 if terminal else QUIET) and not done:
            return
        shown = now
        total = f" of {progress.limit:,}" if progress.limit else ""
        speed = progress.tokens / max(now - start, 1e-9)
        line = (
            f"{progress.tokens:,}{total} tokens, {progress.documents:,} documents, {speed:,.0f}/s"
        )
        print(
            f"\r{line}\x1b[K" if terminal else line,
            end="" if terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    return report


def describe_folder(folder: TokenFolder) -> str:
    """A token folder in lines."""
    counts = ", ".join(f"{getattr(folder, split).count:,} for {split}" for split in SPLITS)
    return "\n".join(
        (
            f"{folder.path}: {counts}",
            f"{folder.tokenizer}, vocabulary {folder.vocab:,}, from {folder.source}",
            f"sha256 {folder.checksum()}",
        )
    )
