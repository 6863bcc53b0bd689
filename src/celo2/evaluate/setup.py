"""A config's task, optimizer and trainer put together, before anything is compiled."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from celo2.evaluate.adapt import accumulated, in_precision
from celo2.evaluate.config import RunConfig
from celo2.evaluate.feed import place_arrays
from celo2.evaluate.find import find
from celo2.evaluate.norms import group_leaves, with_norms
from celo2.evaluate.optimizers import load_rule, make_optimizer
from celo2.evaluate.schedules import schedule_shape
from celo2.evaluate.sharding import (
    check_batch,
    on_mesh,
    optimizer_specs,
    parameter_specs,
    spread_batch,
)
from celo2.rule import Rule
from celo2.rulefile import digest as digest_rule
from celo2.runs.digest import digest_arrays, name_arrays
from celo2.runs.mesh import DATA
from celo2.tasks import Stream, Task, TaskSpec, Trainer, supervised


class Setup(NamedTuple):
    """How a run trains; `data` is None for a task that has none.

    The learning rate and the rule's weights are arguments, so that all rates and all rules of a
    config share one compiled program.
    """

    config: RunConfig
    spec: TaskSpec
    mesh: Mesh | None  # None is one device
    data: Any  # arrays on the devices, or a Stream
    given: Any  # what a step gets: those arrays, or the shapes of a batch
    checksum: str  # SHA-256 of the data
    rule: str | None  # SHA-256 of the rule
    weights: dict[str, Array]  # of the rule, none without one
    trainer: Callable[
        [Any, Array | float, Mapping[str, Array]], Trainer
    ]  # data, rate, weights -> …
    abstract: Any  # shapes of the trainer's state, and places if there is a mesh
    chained: bool  # whether steps should be compiled into a loop
    evaluations: int  # validation batches, if not chained one for each call of `evaluate`
    sizes: dict[str, Any]


def set_up(
    config: RunConfig,
    data: str | PathLike | None = None,
    mesh: Mesh | None = None,
    *,
    blank: bool = False,
    rule: Rule | None = None,
) -> Setup:
    """The parts of a resolved config; `blank` takes shapes in place of the data.

    The rule is the optimizer's, unless one is given.
    """
    spec = find(config.task)
    made, checksum = (
        _make_blank(config)
        if blank
        else _make(config.task, config.text, config.batch, config.remat, data)
    )
    problem = _adapt(made, config, mesh)
    rule = load_rule(config.optimizer) if rule is None else rule
    assert config.steps is not None
    shape = schedule_shape(config, config.steps * spec.updates_per_step)

    def optimizer(rate: Array | float, weights: Mapping[str, Array]):
        used = None if rule is None else Rule(rule.config, weights)
        return with_norms(make_optimizer(config, used, lambda count: rate * shape(count)))

    def trainer(arrays: Any, rate: Array | float, weights: Mapping[str, Array]) -> Trainer:
        tx = optimizer(rate, weights)
        if not isinstance(problem, Task):
            return spec.train(problem, tx)
        return supervised(problem._replace(data=arrays), tx, batches if chained else 1)

    batches = config.evaluation_batches
    arrays = problem.data if isinstance(problem, Task) else None
    chained = not isinstance(arrays, Stream) and not _is_slow_in_loops(problem)
    arrays = arrays if isinstance(arrays, Stream) else place_arrays(arrays, mesh)
    given = _batch_shapes(arrays, mesh) if isinstance(arrays, Stream) else arrays
    weights = place_weights(rule, mesh)
    abstract = jax.eval_shape(lambda key: trainer(given, 1.0, weights).init(key), jax.random.key(0))
    if mesh is not None:
        specs = parameter_specs(abstract.params, mesh)
        inner = optimizer_specs(optimizer(1.0, weights), abstract.params, specs, mesh)
        abstract = on_mesh(abstract, type(abstract)(specs, inner), mesh)
    return Setup(
        config=config,
        spec=spec,
        mesh=mesh,
        data=arrays,
        given=given,
        checksum=checksum,
        rule=None if rule is None else digest_rule(rule),
        weights=weights,
        trainer=trainer,
        abstract=abstract,
        chained=chained,
        evaluations=batches,
        sizes=_sizes(config, problem, abstract),
    )


def place_weights(rule: Rule | None, mesh: Mesh | None) -> dict[str, Array]:
    """The rule's arrays on every device."""
    arrays = {} if rule is None else {k: np.asarray(w, np.float32) for k, w in rule.weights.items()}
    return jax.tree.map(jnp.asarray, arrays) if mesh is None else place_arrays(arrays, mesh)


def check_metric(setup: Setup, valid: Iterable[str]) -> None:
    """Refuses a task that does not give the metric by which its runs are compared."""
    if setup.spec.metric not in valid:
        raise ValueError(
            f"runs of {setup.config.task} are compared by {setup.spec.metric!r}, which is not "
            f"among its metrics, {', '.join(sorted(valid))}: give its TaskSpec one of them."
        )


def count_bytes(tree: Any) -> int:
    """The bytes of all arrays, or of what they would take."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@lru_cache(maxsize=1)
def _make(
    task: str, text: str | None, batch: int | None, remat: bool, data: Any
) -> tuple[Any, str]:
    """The task and the SHA-256 of its data; the newest is kept for the next run of a sweep."""
    made = _call(task, find(task).make, batch=batch, data=data, text=text, remat=remat or None)
    if isinstance(made, Task) and isinstance(made.data, Stream):
        return made, made.data.checksum
    arrays = name_arrays(jax.tree.map(np.asarray, made.data)) if isinstance(made, Task) else {}
    return made, digest_arrays(arrays)


def _make_blank(config: RunConfig) -> tuple[Any, str]:
    spec = find(config.task)
    options = {"batch": config.batch, "remat": config.remat or None}
    return _call(config.task, spec.blank or spec.make, **options), ""


def _call(task: str, make: Callable[..., Any], **options: Any) -> Any:
    """`make` with the options that were given, if it takes them."""
    takes = inspect.signature(make).parameters
    given = {name: value for name, value in options.items() if value is not None}
    if "data" not in takes:
        given.pop("data", None)  # a folder for all tasks of a sweep
    if unknown := [name for name in given if name not in takes]:
        raise ValueError(f"{unknown[0]}={given[unknown[0]]!r} is nothing that {task} takes.")
    made = make(**given)
    if find(task).train is supervised and not isinstance(made, Task):
        raise ValueError(f"task={task!r} returned a {type(made).__name__}, not a Task.")
    return made


def _adapt(made: Any, config: RunConfig, mesh: Mesh | None) -> Any:
    if not isinstance(made, Task):
        if mesh is not None:
            raise ValueError(f"{config.task} runs on one device: leave the mesh out.")
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
    if config.accumulate > 1:
        made = accumulated(made, config.accumulate)
    if mesh is None:
        return made
    check_batch(config.batch, config.accumulate, mesh)
    sample = made.sample
    return made._replace(sample=lambda *draw: spread_batch(sample(*draw), mesh))


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


def _batch_shapes(stream: Stream, mesh: Mesh | None) -> Any:
    """A batch of the stream, and its place if there is a mesh."""
    if mesh is None:
        return stream.example
    return on_mesh(stream.example, jax.tree.map(lambda _: P(DATA), stream.example), mesh)


def _batch(problem: Task) -> Any:
    """The shapes of a training batch."""
    if isinstance(problem.data, Stream):
        return problem.data.example
    return jax.eval_shape(lambda key: problem.sample(problem.data, key, "train"), jax.random.key(0))


def _tokens(problem: Any) -> int | None:
    """The tokens a step predicts, where a batch is rows of them; else None."""
    if not isinstance(problem, Task):
        return None
    batch = _batch(problem)
    if not (hasattr(batch, "ndim") and batch.ndim == 2):
        return None
    return batch.shape[0] * (batch.shape[1] - 1)
