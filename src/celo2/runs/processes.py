"""What the processes of one run agree on; one process alone agrees with itself."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from celo2.runs import checkpoint
from celo2.runs.checkpoint import Checkpoint
from celo2.runs.folder import RunRefused

T = TypeVar("T")


def is_primary() -> bool:
    """Whether this is the process that writes records and rules."""
    return jax.process_index() == 0


def some_process(*flags: bool) -> list[bool]:
    """For each flag, whether it is up in any process: all then do the same."""
    if jax.process_count() == 1:
        return list(flags)
    return multihost_utils.process_allgather(np.array(flags)).any(axis=0).tolist()


def in_primary(action: Callable[[], T]) -> T | None:
    """What `action` returns in the process that writes; if it fails there, all processes fail."""
    result, error = None, None
    if is_primary():
        try:
            result = action()
        except Exception as caught:
            error = caught
    if some_process(error is not None)[0]:
        raise error or RunRefused("Process 0 could not start; see its message.")
    return result


def share_checkpoint(folder: Path, found: Checkpoint | None) -> Checkpoint | None:
    """The checkpoint that process 0 found in its folder, in every process."""
    if jax.process_count() == 1:
        return found
    mine = np.int32(found.iteration if found else -1)
    iteration = int(multihost_utils.broadcast_one_to_all(mine))
    if found is None and iteration >= 0:
        return checkpoint.read(folder, iteration)
    return found
