"""A config's task, optimizer and trainer put together, before anything is compiled."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from celo2.evaluate.config import RunConfig, find_task
from celo2.evaluate.optimizers import (
    group_leaves,
    load_rule,
    make_optimizer,
    schedule_shape,
    with_norms,
)
from celo2.jax.optimizer import leaf_paths
from celo2.rule import Rule
from celo2.rulefile import digest as digest_rule
from celo2.runs.checkpoint import digest_arrays, like_tree, name_arrays
from celo2.runs.processes import DATA, MODEL
from celo2.tasks import Part, Split, Stream, Task, TaskSpec, Trainer, supervised


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
    trainer: Callable[..., Trainer]  # data[, learning rate, weights] -> …
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
    spec = find_task(config.task)
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
        used = None if rule is None else replace(rule, weights=weights)
        return with_norms(make_optimizer(config, used, lambda count: rate * shape(count)))

    weights = place_weights(rule, mesh)

    def trainer(
        arrays: Any, rate: Array | float = 1.0, weights: Mapping[str, Array] = weights
    ) -> Trainer:
        tx = optimizer(rate, weights)
        if not isinstance(problem, Task):
            return spec.train(problem, tx)
        return supervised(problem._replace(data=arrays), tx, batches if chained else 1)

    batches = config.evaluation_batches
    arrays = problem.data if isinstance(problem, Task) else None
    chained = not isinstance(arrays, Stream) and not _is_slow_in_loops(problem)
    arrays = arrays if isinstance(arrays, Stream) else place_arrays(arrays, mesh)
    given = _batch_shapes(arrays, mesh) if isinstance(arrays, Stream) else arrays
    abstract = jax.eval_shape(lambda key: trainer(given).init(key), jax.random.key(0))
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
    made = _call(task, find_task(task).make, batch=batch, data=data, text=text, remat=remat or None)
    if isinstance(made, Task) and isinstance(made.data, Stream):
        return made, made.data.checksum
    arrays = name_arrays(jax.tree.map(np.asarray, made.data)) if isinstance(made, Task) else {}
    return made, digest_arrays(arrays)


def _make_blank(config: RunConfig) -> tuple[Any, str]:
    spec = find_task(config.task)
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
    if find_task(task).train is supervised and not isinstance(made, Task):
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
    return made._replace(sample=lambda *draw: shard_batch(sample(*draw), mesh))


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


def in_precision(task: Task, dtype: Any) -> Task:
    """The task with its model's arithmetic in `dtype`; parameters and gradients stay as they are.

    The tasks' own losses are float32 sums even so, and gathered parameters are cast by the task.
    """

    def cast(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def loss(params, batch):
        named = name_arrays(params)
        _check_gathered(task, named)
        half = {name: x if name in task.gathered else cast(x) for name, x in named.items()}
        value, metrics = task.loss(like_tree(params, half), jax.tree.map(cast, batch))
        return value.astype(jnp.float32), metrics

    return task._replace(loss=loss)


def accumulated(task: Task, parts: int) -> Task:
    """The task whose gradient is the mean of its batch's parts, computed one after the other.

    Only one part's activations are alive at a time. The loss must be a mean over the batch, whose
    arrays all have the examples first.
    """

    def split(batch):
        # Every parts-th example, not runs of them: examples stay on the devices they are on.
        cut = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]), batch)
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), cut)

    def mean_over(function, batch):
        """The mean of `function` over the parts, added up in the order of the parts."""
        pieces = split(batch)
        shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], pieces))
        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        def add(total, piece):
            return jax.tree.map(jnp.add, total, function(piece)), None

        total, _ = jax.lax.scan(add, start, pieces)
        return jax.tree.map(lambda x: x / parts, total)

    @jax.custom_vjp
    def loss(params, batch):
        return mean_over(lambda piece: task.loss(params, piece), batch)

    def forward(params, batch):
        gradient = jax.value_and_grad(task.loss, has_aux=True)
        return mean_over(lambda piece: gradient(params, piece), batch)

    def backward(grads, cotangents):
        # The metrics are for reading only: no gradient comes back through them.
        return jax.tree.map(lambda g: cotangents[0].astype(g.dtype) * g, grads), None

    loss.defvjp(forward, backward)
    return task._replace(loss=loss)


def _check_gathered(task: Task, params: Mapping[str, Any]) -> None:
    if unknown := [name for name in task.gathered if name not in params]:
        raise ValueError(
            f"gathered={task.gathered}: there is no parameter {unknown[0]!r}; there are "
            f"{', '.join(params)}."
        )


class Batches:
    """What a step or a validation is given as its data.

    Batches are read ahead while the devices work. Asking for the steps in order is fast; any other
    step is found as well.
    """

    def __init__(self, data: Any, split: Split, seed: int, mesh: Mesh | None):
        self._data, self._seed, self._mesh = data, seed, mesh
        self._split: Split = split
        self._next, self._batches = -1, iter(())

    def at(self, step: int) -> Any:
        """The data of that step."""
        if not isinstance(self._data, Stream):
            return self._data
        if step != self._next:
            self._batches = self._open(step)
        self._next = step + 1
        return place_batch(next(self._batches), self._data.example, self._mesh)

    def _open(self, step: int) -> Iterator[Any]:
        assert isinstance(self._data, Stream)
        part = Part(jax.process_index(), jax.process_count())
        return self._data.batches(self._split, self._seed, step, part)


def place_batch(rows: Any, example: Any, mesh: Mesh | None) -> Any:
    """The batch on the devices, of which `rows` are those of this process."""
    if mesh is None:
        return jax.tree.map(jax.numpy.asarray, rows)
    sharding = NamedSharding(mesh, P(DATA))

    def place(mine: np.ndarray, whole: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, np.asarray(mine), whole.shape)

    return jax.tree.map(place, rows, example)


def place_arrays(data: Any, mesh: Mesh | None) -> Any:
    """A task's arrays on every device."""
    if mesh is None or data is None:
        return data
    return jax.device_put(jax.tree.map(np.asarray, data), NamedSharding(mesh, P()))


# Layers whose outputs, or inputs, are spread over the model axis.
BY_COLUMNS = ("q", "k", "v", "up", "lm_head")
BY_ROWS = ("o", "down", "embed")
SMALLEST = 2  # axes of a tensor that is cut; smaller ones are on every device


def parameter_specs(params: Any, mesh: Mesh) -> Any:
    """A PartitionSpec for each parameter."""
    leaves, structure = jax.tree.flatten(params)
    specs = [
        leaf_spec(path, leaf.shape, dict(mesh.shape))
        for path, leaf in zip(leaf_paths(params), leaves, strict=True)
    ]
    return structure.unflatten(specs)


def leaf_spec(path: str, shape: tuple[int, ...], sizes: dict[str, int]) -> P:
    """How one parameter is cut, by its path and shape.

    >>> tuple(leaf_spec("block_0/mlp/up/kernel", (64, 256), {"data": 4, "model": 2}))
    ('data', 'model')
    """
    if len(shape) < SMALLEST:
        return P()
    axes: list[str | None] = [None] * len(shape)
    layer = path.split("/")[-2:][0]
    side = len(shape) - 1 if layer in BY_COLUMNS else len(shape) - 2
    if layer in BY_COLUMNS + BY_ROWS and _divides(sizes[MODEL], shape[side]):
        axes[side] = MODEL
    # The longer of the last two sides, the columns of a square: what is left of them.
    for side in sorted((len(shape) - 1, len(shape) - 2), key=lambda i: -shape[i]):
        if axes[side] is None and _divides(sizes[DATA], shape[side]):
            axes[side] = DATA
            break
    return P(*axes)


def optimizer_specs(tx: optax.GradientTransformation, params: Any, specs: Any, mesh: Mesh) -> Any:
    """PartitionSpecs of the optimizer's state for parameters of these shapes and specs.

    Found by tracing `init` with shardings as part of the types, so it holds for any optimizer.
    """
    explicit = AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names)
    )

    def typed(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(explicit, spec))

    with jax.sharding.use_abstract_mesh(explicit):
        found = jax.eval_shape(tx.init, jax.tree.map(typed, params, specs))
    return jax.tree.map(lambda x: x.sharding.spec if x.sharding else P(), found)


def on_mesh(abstract: Any, specs: Any, mesh: Mesh) -> Any:
    """The shapes with their places."""
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        abstract,
        specs,
    )


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """The batch with its examples, which come first, spread over the data axis."""
    return jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(DATA))), batch
    )


def check_batch(batch: int | None, accumulate: int, mesh: Mesh) -> None:
    """Raises a ValueError unless every part of a batch can be shared by the data axis."""
    if batch is not None and batch % (accumulate * mesh.shape[DATA]):
        raise ValueError(
            f"batch={batch} in {accumulate} parts cannot be shared by {mesh.shape[DATA]} devices "
            f"along {DATA}: choose a multiple of {accumulate * mesh.shape[DATA]}."
        )


def _divides(size: int, length: int) -> bool:
    return size > 1 and length % size == 0
