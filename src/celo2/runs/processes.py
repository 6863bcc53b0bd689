"""The devices and processes of one run, and what the processes agree on."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from celo2.runs import checkpoint
from celo2.runs.checkpoint import Checkpoint, Damage
from celo2.runs.folder import RunRefused

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes in a mesh's description; an axis that is not named has size 1.

    >>> parse_mesh("data=4,model=2")
    {'data': 4, 'model': 2}
    """
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh={text!r} is not of the form data=4,model=2: {part.strip()!r} names no axis "
                f"of {', '.join(AXES)} with a positive size."
            )
        sizes[name] = int(size)
    return sizes


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """The mesh of that shape over all devices, in the order that JAX finds fastest."""
    asked, there = math.prod(sizes.values()), jax.device_count()
    if asked != there:
        shape = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"mesh={shape!r} has {asked} places, and there are {there} devices: choose sizes whose "
            f"product is {there}, or set the number of CPU devices with --devices."
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


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


def restore_newest(folder: Path, abstract: Any) -> tuple[Checkpoint | None, list[Damage]]:
    """The newest checkpoint that every process can read, on the devices of `abstract`, and those
    after it that are damaged. Which there are is process 0's to say."""
    damages = []
    iterations = checkpoint.list_iterations(folder)
    while (iteration := _same_everywhere(iterations.pop() if iterations else -1)) >= 0:
        found, cause = _attempt(lambda i: checkpoint.read_parts(folder, i, abstract), iteration)
        if cause is None:
            cause = _attempt(checkpoint.check, found)[1]
        if cause is None:
            return found, damages
        damages.append(Damage(iteration, cause))
    return None, damages


def _attempt(action: Callable[[Any], T], value: Any) -> tuple[T | None, str | None]:
    """What `action` returns here, and why it failed in some process."""
    result, cause = None, None
    try:
        result = action(value)
    except RunRefused:  # for reasons that are the same in all processes
        raise
    except Exception as error:  # whatever a damaged file makes orbax raise
        cause = checkpoint.first_line(error)
    if some_process(cause is not None)[0]:
        return None, cause or "another process cannot read its part"
    return result, None


def _same_everywhere(number: int) -> int:
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))
