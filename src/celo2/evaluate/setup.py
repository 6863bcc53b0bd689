"""A config's task, optimizer and trainer put together, before anything is compiled."""

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from celo2.evaluate.adapt import accumulated, in_precision
from celo2.evaluate.config import RunConfig
from celo2.evaluate.norms import group_leaves, with_norms
from celo2.evaluate.optimizers import load_rule, make_optimizer
from celo2.evaluate.schedules import schedule_shape
from celo2.runs.digest import digest_arrays, name_arrays
from celo2.tasks import Task, TaskSpec, Trainer, find, supervised
from celo2.weights import digest as digest_rule


class Setup(NamedTuple):
    """How a run trains; `data` is None for a task that has none.

    The learning rate is an argument, so that all rates share one compiled program.
    """

    config: RunConfig
    spec: TaskSpec
    data: Any
    checksum: str  # SHA-256 of the data
    rule: str | None  # SHA-256 of the rule
    trainer: Callable[[Any, Array | float], Trainer]  # data, learning rate -> …
    abstract: Any  # shapes of the trainer's state
    chained: bool  # whether steps should be compiled into a loop
    evaluations: int  # validation batches, if not chained one for each call of `evaluate`
    sizes: dict[str, Any]


def set_up(config: RunConfig, data: str | PathLike | None = None, *, blank: bool = False) -> Setup:
    """The parts of a resolved config; `blank` takes shapes in place of the data."""
    spec = find(config.task)
    made, checksum = (
        _make_blank(config) if blank else _make(config.task, config.text, config.batch, data)
    )
    problem = _adapt(made, config)
    rule = load_rule(config.optimizer)
    assert config.steps is not None
    shape = schedule_shape(config, config.steps * spec.updates_per_step)

    def trainer(arrays: Any, rate: Array | float) -> Trainer:
        tx = with_norms(make_optimizer(config, rule, lambda count: rate * shape(count)))
        if not isinstance(problem, Task):
            return spec.train(problem, tx)
        return supervised(problem._replace(data=arrays), tx, batches if chained else 1)

    batches, chained = config.evaluation_batches, not _is_slow_in_loops(problem)
    arrays = problem.data if isinstance(problem, Task) else None
    abstract = jax.eval_shape(lambda key: trainer(arrays, 1.0).init(key), jax.random.key(0))
    return Setup(
        config=config,
        spec=spec,
        data=arrays,
        checksum=checksum,
        rule=None if rule is None else digest_rule(rule),
        trainer=trainer,
        abstract=abstract,
        chained=chained,
        evaluations=batches,
        sizes=_sizes(config, problem, abstract),
    )


def count_bytes(tree: Any) -> int:
    """The bytes of all arrays, or of what they would take."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@lru_cache(maxsize=1)
def _make(task: str, text: str | None, batch: int | None, data: Any) -> tuple[Any, str]:
    """The task and the SHA-256 of its data; the newest is kept for the next run of a sweep."""
    made = _call(task, find(task).make, batch=batch, data=data, text=text)
    arrays = name_arrays(jax.tree.map(np.asarray, made.data)) if isinstance(made, Task) else {}
    return made, digest_arrays(arrays)


def _make_blank(config: RunConfig) -> tuple[Any, str]:
    spec = find(config.task)
    return _call(config.task, spec.blank or spec.make, batch=config.batch), ""


def _call(task: str, make: Callable[..., Any], **options: Any) -> Any:
    """`make` with the options that were given, if it takes them."""
    takes = inspect.signature(make).parameters
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := [name for name in given if name not in takes]:
        raise ValueError(f"{unknown[0]}={given[unknown[0]]!r} is nothing that {task} takes.")
    return make(**given)


def _adapt(made: Any, config: RunConfig) -> Any:
    if not isinstance(made, Task):
        for name, usual in (("accumulate", 1), ("precision", "float32")):
            if getattr(config, name) != usual:
                raise ValueError(
                    f"{name}={getattr(config, name)!r} is for supervised tasks; {config.task} "
                    f"has {usual!r} only."
                )
        return made
    if config.batch is not None and config.batch % config.accumulate:
        raise ValueError(f"accumulate={config.accumulate} does not divide batch={config.batch}.")
    if config.precision != "float32":
        made = in_precision(made, jnp.dtype(config.precision))
    return accumulated(made, config.accumulate) if config.accumulate > 1 else made


def _sizes(config: RunConfig, problem: Any, abstract: Any) -> dict[str, Any]:
    """What a report needs to know of the model and its batches."""
    groups = group_leaves(abstract.params)
    counts = {name: sum(math.prod(x.shape) for x in xs) for name, xs in groups.items()}
    return {
        "parameters": sum(counts.values()),
        "parameters_by_group": counts,
        "tensors": len(jax.tree.leaves(abstract.params)),
        "state_bytes": count_bytes(abstract.optimizer.inner),
        "examples_per_step": config.batch if isinstance(problem, Task) else None,
        "tokens_per_step": _tokens(problem),
    }


def _is_slow_in_loops(problem: Any) -> bool:
    """Whether the loss has convolutions, on a CPU: XLA makes them 17 times as slow in a loop."""
    if jax.default_backend() != "cpu" or not isinstance(problem, Task):
        return False
    params = jax.eval_shape(problem.init, jax.random.key(0))
    return "conv_general_dilated" in str(jax.make_jaxpr(problem.loss)(params, _batch(problem)))


def _batch(problem: Task) -> Any:
    """The shapes of a training batch."""
    return jax.eval_shape(lambda key: problem.sample(problem.data, key, "train"), jax.random.key(0))


def _tokens(problem: Any) -> int | None:
    """The tokens a step predicts, where a batch is rows of them; else None."""
    if not isinstance(problem, Task):
        return None
    batch = _batch(problem)
    if not (hasattr(batch, "ndim") and batch.ndim == 2):
        return None
    return batch.shape[0] * (batch.shape[1] - 1)
