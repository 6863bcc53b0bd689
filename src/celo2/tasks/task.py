"""The interface of tasks: a Task is a problem, a Trainer is a problem with its optimizer.

A task's data are arrays on the devices or, where these are too large, a Stream of batches.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from celo2.rulefile import import_extra

Split = Literal["train", "valid"]
"""Which part of a dataset a batch is drawn from."""


class Task(NamedTuple):
    """A supervised problem as pure functions, and the arrays it draws its batches from.

    `data` is an argument of `sample` and not hidden inside it: a compiled function that closes
    over an array carries a copy of it as a constant. Pass `task.data` through every `jit`.

    Parameters that are `gathered` stay float32 in half precision, and `loss` casts what it read:
    the gradient of a gather is a sum over a batch's tokens, which bfloat16 ends at 256.
    """

    init: Callable[[jax.Array], Any]  # key -> params
    sample: Callable[[Any, jax.Array, Split], Any]  # data, key, split -> batch
    loss: Callable[[Any, Any], tuple[jax.Array, dict[str, jax.Array]]]  # params, batch -> …
    data: Any = None  # arrays, or a Stream
    gathered: tuple[str, ...] = ()  # paths of parameters that `loss` reads by index, "embed.table"


class Trainer(NamedTuple):
    """Anything that trains, supervised or not; `step` and `evaluate` are already compiled."""

    init: Callable[[jax.Array], Any]  # key -> state
    step: Callable[[Any, jax.Array], tuple[Any, dict[str, jax.Array]]]  # state, key -> …
    evaluate: Callable[[Any, jax.Array], dict[str, jax.Array]]  # state, key -> metrics


class TrainState(NamedTuple):
    """The parameters and the optimizer's state."""

    params: Any
    optimizer: Any


def supervised(
    task: Task, tx: optax.GradientTransformation, evaluation_batches: int = 16, accumulate: int = 1
) -> Trainer:
    """The trainer that minimizes `task.loss` with `tx`, with a fresh training batch at each step.

    A step's metrics, including `loss`, are those of its batch before the update; `tx` is given the
    loss as `value` if it takes extra arguments. `evaluate` averages over `evaluation_batches`
    validation batches: the same key draws the same ones.

    With `accumulate` a batch is split into as many parts, computed one after the other, whose
    gradients are averaged: only one part's activations are in memory at a time. The loss must be a
    mean over the batch, and examples the first axis of all its arrays.

    >>> from celo2.tasks import TASKS
    >>> trainer = supervised(TASKS["digits-mlp"].make(), optax.adam(1e-3))
    >>> state, metrics = trainer.step(trainer.init(jax.random.key(0)), jax.random.key(1))
    >>> sorted(metrics)
    ['accuracy', 'loss']
    """

    tx = optax.with_extra_args_support(tx)

    def loss(params, batch):
        value, metrics = task.loss(params, batch)
        return value, {"loss": value, **metrics}

    def init(key):
        params = task.init(key)
        return TrainState(params, tx.init(params))

    def step(data, state, key):
        gradient = partial(jax.grad(loss, has_aux=True), state.params)
        grads, metrics = mean_over_parts(gradient, task.sample(data, key, "train"), accumulate)
        updates, optimizer = tx.update(grads, state.optimizer, state.params, value=metrics["loss"])
        return TrainState(optax.apply_updates(state.params, updates), optimizer), metrics

    def evaluate(data, state, key):
        def metrics_of(key):
            batch = task.sample(data, key, "valid")
            return mean_over_parts(lambda part: loss(state.params, part)[1], batch, accumulate)

        rows = jax.lax.map(metrics_of, jax.random.split(key, evaluation_batches))
        return jax.tree.map(jnp.mean, rows)

    return Trainer(init, partial(jax.jit(step), task.data), partial(jax.jit(evaluate), task.data))


def mean_over_parts(function: Callable[[Any], Any], batch: Any, parts: int) -> Any:
    """The mean of `function` over the parts of a batch, summed in their order."""
    if parts == 1:
        return function(batch)
    # Strided, not contiguous parts: examples stay on the devices they are on.
    cut = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]), batch)
    pieces = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), cut)
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], pieces))
    start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def add(total, piece):
        return jax.tree.map(jnp.add, total, function(piece)), None

    total, _ = jax.lax.scan(add, start, pieces)
    return jax.tree.map(lambda x: x / parts, total)


def over_seeds(trainer: Trainer) -> Trainer:
    """The trainer of several runs side by side: its keys, state and metrics have a leading axis.

    >>> def count(state, key):
    ...     return state + 1, {"count": state}
    >>> trainer = over_seeds(Trainer(jax.random.bits, count, lambda state, key: {}))
    >>> state = trainer.init(jax.random.split(jax.random.key(0), 3))
    >>> state.shape
    (3,)
    """
    return Trainer(*(jax.jit(jax.vmap(function)) for function in trainer))


class TaskSpec(NamedTuple):
    """A task's entry in the table: how to make and train it, and how long a small run of it is.

    `train(make(...), tx)` is its trainer. `make` takes the keywords `batch` and `data` (a folder),
    and for language models `text`; only `train` uses what it returns. `metric` names the validation
    metric by which runs are compared. `blank` is `make` without data, for shapes only; None where
    `make` needs no data.
    """

    make: Callable[..., Any]
    steps: int
    batch: int | None  # None for a task that has its own
    metric: str = "loss"
    updates_per_step: int = 1
    higher_is_better: bool = False
    train: Callable[[Any, optax.GradientTransformation], Trainer] = supervised
    blank: Callable[..., Any] | None = None


class Part(NamedTuple):
    """The rows of every batch that one process reads: part `index` of `count` equal ones."""

    index: int = 0
    count: int = 1


class Stream(NamedTuple):
    """A task's `data` whose batches are read while it trains.

    `batches(split, seed, first, part)` yields this process's rows of batch number `first`, the
    next and so on, without end. The same arguments give the same batches, whatever was read
    before: a run resumes at its step, and any number of processes read the same batches together.
    The task's `sample` returns its first argument, which is then the batch.
    """

    batches: Callable[[Split, int, int, Part], Iterator[Any]]
    example: Any  # jax.ShapeDtypeStruct of a whole batch
    checksum: str  # SHA-256 of the data


def read_batches(
    examples: Any,
    batch: int,
    first: int,
    part: Part,
    *,
    threads: int,
    ahead: int,
    whole: bool = False,
) -> Iterator[Any]:
    """The rows `part` of batch `first` of the examples, of the next one and so on.

    Args:
        examples: an endless grain MapDataset, one example after the other.
        batch: rows of a whole batch, of which part p of n has the rows p, p + n, p + 2n …
        threads: how many read.
        ahead: batches that are read before they are needed.
        whole: each thread reads whole batches, not single examples; faster for small examples.
    """
    if first < 0:
        raise ValueError(f"first={first} is not the number of a batch: they begin with 0.")
    if not 0 <= part.index < part.count:
        raise ValueError(f"There is no part {part.index} of {part.count}: they begin with 0.")
    if batch % part.count:
        raise ValueError(
            f"A batch of {batch} rows does not divide into {part.count} equal parts: take a "
            "multiple of the number of processes."
        )
    grain = import_extra("grain", "data")
    rows = batch // part.count
    mine = examples[first * batch + part.index :: part.count]
    if whole:
        # An endless dataset has no remainder; without this, rows of 1 overflow its length.
        mine = mine.batch(rows, drop_remainder=True)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
        return _closing(iter(mine.to_iter_dataset(options)))
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead * rows)
    return _closing(iter(mine.to_iter_dataset(options).batch(rows)))


def _closing(batches: Any) -> Iterator[Any]:
    """The batches of a grain iterator, whose threads end when this one does."""
    try:
        yield from batches
    finally:
        batches.close()
