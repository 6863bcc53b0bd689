"""From a config to the tasks it trains on, and the checksums of their data."""

from os import PathLike
from typing import NamedTuple

import jax
import numpy as np

from celo2.metatrain.config import MetaConfig
from celo2.metatrain.inner import Family, image_family, task_family
from celo2.runs.address import import_function
from celo2.runs.digest import digest_arrays, name_arrays
from celo2.tasks import Task, images


class Source(NamedTuple):
    """A family of tasks and the SHA-256 of each one's data."""

    family: Family
    checksums: dict[str, str]


def load_family(
    config: MetaConfig, data: str | PathLike | None = None, task: Task | None = None
) -> Source:
    """The config's image sets, its task, or a task given as such.

    A task is known by its data: its functions are no part of the checksum.
    """
    if config.task is not None:
        if task is not None:
            raise ValueError(f"config.task={config.task!r} and a task were given: give one.")
        task = import_task(config.task)
    if task is None:
        sets = images.select(config.datasets, data)
        return Source(image_family(sets, config.batch), {s.name: s.checksum() for s in sets})
    if config.datasets is not None:
        raise ValueError(f"datasets={config.datasets} do not go with a task of your own.")
    name = config.task or "task"
    arrays = name_arrays(jax.tree.map(np.asarray, task.data))
    return Source(task_family(task, name), {name: digest_arrays(arrays)})


def count_problems(config: MetaConfig, data: str | PathLike | None = None) -> int:
    """How many problems the config makes, without touching a device."""
    own = config.task is not None
    return config.problems * (1 if own else len(images.select(config.datasets, data)))


def import_task(address: str) -> Task:
    """What the function at `module:function` returns, which must be a Task."""
    task = import_function(address, "task", "own_task:make")()
    if not isinstance(task, Task):
        raise ValueError(f"task={address!r} returned a {type(task).__name__}, not a Task.")
    return task
