"""`celo2 data fetch`: the image sets, downloaded."""

import sys
from typing import Literal

from celo2.tasks.fetch import FetchError, Progress, fetch
from celo2.tasks.images import NAMES


def data_command(
    action: Literal["fetch"],
    names: tuple[str, ...] = NAMES,
    data: str | None = None,
    full: bool = False,
    force: bool = False,
) -> int:
    """Download image sets from the Hugging Face hub and shrink them to 8×8.

    Args:
        action: fetch is all there is.
        names: which of mnist, fashion_mnist, cifar10, svhn.
        data: where to; by default CELO2_DATA, else the cache folder, where they are looked for.
        full: keep the images at full size too.
        force: download again what is there already.
    """
    try:
        digests = fetch(data, names, full=full, force=force, report=show)
    except FetchError as error:
        print(f"celo2: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for name, digest in digests.items():
        print(f"{name:<24} sha256 {digest}")
    return 0


def show(progress: Progress) -> None:
    """One line per dataset, rewritten as it goes on."""
    terminal = sys.stderr.isatty()
    if progress.state == "converting":
        if terminal:
            done = f"{progress.done:,} of {progress.total:,}"
            print(f"\r{progress.name:<14} {done}", end="", file=sys.stderr, flush=True)
        return
    start = "\r\x1b[K" if terminal else ""
    print(f"{start}{progress.name:<14} {progress.state}", file=sys.stderr)
