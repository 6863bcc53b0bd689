"""From a config to the tasks it trains on, and the checksums of their data."""

import importlib
from os import PathLike
from typing import NamedTuple

import jax
import numpy as np

from celo2.metatrain.config import MetaConfig
from celo2.metatrain.digest import digest_arrays, name_arrays
from celo2.metatrain.inner import Family, image_family, task_family
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
    module_name, colon, function_name = address.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"task={address!r} is not module:function, such as own_task:make.")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0]:
            raise
        raise ValueError(
            f"task={address!r}: there is no module {module_name!r}; "
            "run in its folder, or put that folder on PYTHONPATH."
        ) from error
    except AttributeError as error:
        raise ValueError(f"task={address!r}: {module_name} has no {function_name!r}.") from error
    task = function()
    if not isinstance(task, Task):
        raise ValueError(f"task={address!r} returned a {type(task).__name__}, not a Task.")
    return task
