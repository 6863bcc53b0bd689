"""A task by its name in the table, or by the address of a function of the user's own."""

import inspect
from functools import lru_cache

from celo2.runs.address import import_function
from celo2.tasks import TaskSpec, task_spec

OWN_STEPS = 1000


@lru_cache
def find(name: str) -> TaskSpec:
    """The entry of that name; `module:function` makes a Task, or is a TaskSpec itself.

    The function gets those of the run's `batch`, `data`, `text` and `remat` that it takes.

    >>> find("digits-mlp").steps
    2000
    """
    if ":" not in name:
        return task_spec(name)
    found = import_function(name, "task", "own_task:make")
    if isinstance(found, TaskSpec):
        return found
    if not callable(found):
        raise ValueError(f"task={name!r} is a {type(found).__name__}, not a function or TaskSpec.")
    batch = inspect.signature(found).parameters.get("batch")
    default = None if batch is None or batch.default is inspect.Parameter.empty else batch.default
    return TaskSpec(found, OWN_STEPS, default)
