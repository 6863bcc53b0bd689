"""A run's task, optimizer and trainer put together, and compiled: steps and a validation.

Steps are chained in one call where that is faster.
"""

import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from celo2.evaluate.config import VARIANTS, RunConfig, find_task, find_variant, resolve
from celo2.evaluate.optimizers import (
    digest_rule,
    group_leaves,
    load_rule,
    make_optimizer,
    schedule_shape,
    with_norms,
)
from celo2.evaluate.sharding import (
    Batches,
    batch_shapes,
    check_batch,
    in_mesh,
    on_mesh,
    optimizer_specs,
    parameter_specs,
    place_arrays,
    shard_batch,
)
from celo2.rule import Rule
from celo2.rulefile import as_rule
from celo2.runs.checkpoint import digest_arrays, like_tree, name_arrays
from celo2.tasks import Stream, Task, TaskSpec, Trainer, supervised
from celo2.velo import CELO, VELO, VeloRule, initial_velo_weights

KEPT = 16  # programs
_programs: dict[Any, "RunProgram"] = {}  # the newest last
VALIDATION_KEY = 1  # the same in every run: all are judged by the same batches


class Setup(NamedTuple):
    """How a run trains; `data` is None for a task that has none.

    The learning rate and the rule's weights are arguments, so that all rates and all rules of a
    config share one compiled program.
    """

    config: RunConfig
    mesh: Mesh | None  # None is one device
    data: Any  # arrays on the devices, or a Stream
    step_data: Any  # what a step is given: those arrays, or the shapes of a batch
    checksum: str  # SHA-256 of the data
    rule: str | None  # SHA-256 of the rule
    weights: dict[str, Array]  # of the rule, none without one
    trainer: Callable[..., Trainer]  # data[, learning rate, weights] -> …
    abstract: Any  # shapes of the trainer's state, with shardings if there is a mesh
    chained: bool  # whether steps should be compiled into a loop
    sizes: dict[str, Any]

    @property
    def spec(self) -> TaskSpec:
        """The entry of its task."""
        return find_task(self.config.task)


def set_up(
    config: RunConfig,
    data: str | PathLike | None = None,
    mesh: Mesh | None = None,
    *,
    blank: bool = False,
    rule: Rule | None = None,
) -> Setup:
    """The setup of a resolved config.

    Args:
        config: the run.
        data: folder of the data files.
        mesh: the devices; None is one device.
        blank: use data of the right shapes in place of the real ones.
        rule: in place of the optimizer's own.
    """
    spec = find_task(config.task)
    made, checksum = (
        _make_blank_task(config)
        if blank
        else _make_task(config.task, config.text, config.batch, config.remat, data)
    )
    problem = _adjust(made, config, mesh)
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
        task = problem._replace(data=arrays)
        return supervised(task, tx, batches if chained else 1, config.accumulate)

    batches = config.evaluation_batches
    arrays = problem.data if isinstance(problem, Task) else None
    if isinstance(arrays, Stream):
        step_data, chained = batch_shapes(arrays, mesh), False
    else:
        arrays = step_data = place_arrays(arrays, mesh)
        chained = not _is_slow_in_loops(problem, _platform_of(arrays))
    abstract = jax.eval_shape(lambda key: trainer(step_data).init(key), jax.random.key(0))
    if mesh is not None:
        specs = parameter_specs(abstract.params, mesh)
        inner = optimizer_specs(optimizer(1.0, weights), abstract.params, specs, mesh)
        abstract = on_mesh(abstract, type(abstract)(specs, inner), mesh)
    return Setup(
        config=config,
        mesh=mesh,
        data=arrays,
        step_data=step_data,
        checksum=checksum,
        rule=digest_rule(rule),
        weights=weights,
        trainer=trainer,
        abstract=abstract,
        chained=chained,
        sizes=_sizes(config, problem, abstract),
    )


def place_weights(rule: Rule | None, mesh: Mesh | None) -> dict[str, Array]:
    """The rule's arrays on every device."""
    weights = {} if rule is None else rule.weights
    return place_arrays({name: np.asarray(w, np.float32) for name, w in weights.items()}, mesh)


def check_metric(setup: Setup, valid: Iterable[str]) -> None:
    """Raises a ValueError if a task's metrics lack the one by which its runs are compared."""
    if setup.spec.metric not in valid:
        raise ValueError(
            f"runs of {setup.config.task} are compared by {setup.spec.metric!r}, which is not "
            f"among its metrics, {', '.join(sorted(valid))}: give its TaskSpec one of them."
        )


def count_bytes(tree: Any) -> int:
    """The bytes of all arrays, which may be shapes only."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@lru_cache(maxsize=1)
def _make_task(
    task: str, text: str | None, batch: int | None, remat: bool, data: Any
) -> tuple[Any, str]:
    """The task and the SHA-256 of its data; the newest is kept for the next run of a sweep."""
    made = _call(task, find_task(task).make, batch=batch, data=data, text=text, remat=remat or None)
    if isinstance(made, Task) and isinstance(made.data, Stream):
        return made, made.data.checksum
    arrays = name_arrays(jax.tree.map(np.asarray, made.data)) if isinstance(made, Task) else {}
    return made, digest_arrays(arrays)


def _make_blank_task(config: RunConfig) -> tuple[Any, str]:
    spec = find_task(config.task)
    options = {"batch": config.batch, "remat": config.remat or None}
    return _call(config.task, spec.blank or spec.make, **options), ""


def _call(task: str, make: Callable[..., Any], **options: Any) -> Any:
    """Calls `make` with the options that are not None; raises a ValueError for one it lacks."""
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


def _adjust(made: Any, config: RunConfig, mesh: Mesh | None) -> Any:
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
    if config.precision != "float32":
        made = in_precision(made, jnp.dtype(config.precision))
    if mesh is None:
        return made
    check_batch(config.batch, config.accumulate, mesh)
    sample = made.sample
    return made._replace(sample=lambda *draw: shard_batch(sample(*draw), mesh))


def _sizes(config: RunConfig, problem: Any, abstract: Any) -> dict[str, Any]:
    """The sizes of the model and its batches, for reports."""
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


def _platform_of(arrays: Any) -> str:
    """The platform that holds the arrays; without any, the one where JAX makes new ones."""
    first = (jax.tree.leaves(arrays) or [jnp.zeros(())])[0]
    return next(iter(first.sharding.device_set)).platform


def _is_slow_in_loops(problem: Any, platform: str) -> bool:
    """Whether the loss has convolutions, on a CPU: XLA makes them 17 times as slow in a loop."""
    if platform != "cpu" or not isinstance(problem, Task):
        return False
    params = jax.eval_shape(problem.init, jax.random.key(0))
    return "conv_general_dilated" in str(jax.make_jaxpr(problem.loss)(params, _batch(problem)))


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
    """The task with its model's arithmetic in `dtype`; parameters and gradients stay float32.

    The loss of our own tasks is still summed in float32, and gathered parameters are cast by the
    task.
    """

    def cast(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def loss(params, batch):
        named = name_arrays(params)
        if unknown := [name for name in task.gathered if name not in named]:
            raise ValueError(
                f"gathered={task.gathered}: there is no parameter {unknown[0]!r}; there are "
                f"{', '.join(named)}."
            )
        half = {name: x if name in task.gathered else cast(x) for name, x in named.items()}
        value, metrics = task.loss(like_tree(params, half), jax.tree.map(cast, batch))
        return value.astype(jnp.float32), metrics

    return task._replace(loss=loss)


class StepResults(NamedTuple):
    """The result of some steps: the number of the last one, and whether all losses were finite.

    Metrics are means over the steps, or the last value for integers; norms are those of the last
    update.
    """

    step: int
    finite: bool
    metrics: dict[str, float]
    norms: dict[str, dict[str, float]]


class Carry(NamedTuple):
    """What one step passes to the next on the device; or the shardings of these arrays."""

    step: Any  # int32
    state: Any
    totals: Any  # of each metric, since the call began
    finite: Any  # whether every loss was


def first_carry(step: int, state: Any, metrics: Mapping[str, jax.ShapeDtypeStruct]) -> Carry:
    """The carry before the first of some steps."""
    totals = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), metrics)
    return Carry(np.int32(step), state, totals, np.bool_(True))


class RunProgram(NamedTuple):
    """A setup and its compiled functions, for any learning rate and seed."""

    setup: Setup
    metrics: dict[str, jax.ShapeDtypeStruct]  # of one step
    advance_compiled: Any  # data, learning rate, rule's weights, seed, carry[, last] -> carry
    evaluate_compiled: Any  # data, state, number -> metrics
    compile_seconds: float
    temporary_bytes: int | None  # of a step, beside state and data

    def start(self, seed: int) -> Any:
        """The state before the first step."""

        def init(seed):
            trainer = self.setup.trainer(self.setup.step_data, 1.0, self.setup.weights)
            return trainer.init(_keys(seed)[0])

        if self.setup.mesh is None:
            # Copies: an array that occurs twice in the state could not be donated twice.
            return jax.tree.map(jnp.copy, init(seed))
        places = jax.tree.map(lambda x: x.sharding, self.setup.abstract)
        return jax.jit(init, out_shardings=places)(np.uint32(seed))

    def batches(self, seed: int) -> Batches:
        """The data of the steps of a run with that seed."""
        return Batches(self.setup.data, "train", seed, self.setup.mesh)

    def advance(
        self, config: RunConfig, batches: Batches, state: Any, first: int, last: int
    ) -> tuple[Any, StepResults]:
        """Steps from `first` to `last`, or until the loss is not finite. Donates the state."""
        fixed = np.float32(config.learning_rate), self.setup.weights, np.uint32(config.seed)
        carry = first_carry(first, state, self.metrics)
        if self.setup.chained:
            carry = self.advance_compiled(batches.at(first), *fixed, carry, np.int32(last))
        else:
            for step in range(first, last):
                carry = self.advance_compiled(batches.at(step), *fixed, carry)
                # Many collectives in a queue may block each other on CPU devices.
                if _platform_of(carry.finite) == "cpu" and not carry.finite:
                    break
        step = int(carry.step)
        results = jax.device_get((carry.totals, carry.state.optimizer.norms))
        totals, norms = jax.tree.map(lambda x: x.item(), results)
        means = {k: v / (step - first) if isinstance(v, float) else v for k, v in totals.items()}
        return carry.state, StepResults(step, bool(carry.finite), means, norms)

    def evaluate(self, state: Any) -> dict[str, float]:
        """The validation metrics."""
        batches = Batches(self.setup.data, "valid", VALIDATION_KEY, self.setup.mesh)
        calls = range(1 if self.setup.chained else self.setup.config.evaluation_batches)
        found = [self.evaluate_compiled(batches.at(i), state, np.int32(i)) for i in calls]
        rows = [jax.tree.map(float, jax.device_get(row)) for row in found]
        return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def build_program(
    config: RunConfig, data: str | PathLike | None = None, mesh: Mesh | None = None
) -> RunProgram:
    """The program of a resolved config, from a cache of the newest ones where possible.

    Configs that differ only in label, learning rate, seed or record_every share a program, and so
    do rules that differ only in their weights.
    """
    rule = load_rule(config.optimizer)
    shared = replace(config, optimizer="", learning_rate=1.0, seed=0, label=None, record_every=1)
    variant = find_variant(config.optimizer)
    use = config.optimizer if variant is None else variant._replace(rule="")
    key = (shared, use, None if rule is None else rule.config, data, mesh)
    program = _programs.pop(key, None) or _compile_program(config, rule, data, mesh)
    _programs[key] = program
    while len(_programs) > KEPT:
        del _programs[next(iter(_programs))]
    if rule is None:
        return program
    mine = {"rule": digest_rule(rule), "weights": place_weights(rule, mesh)}
    return program._replace(setup=program.setup._replace(**mine))


def _compile_program(
    config: RunConfig, rule: Rule | None, data: str | PathLike | None, mesh: Mesh | None
) -> RunProgram:
    setup = set_up(config, data, mesh, rule=rule)
    start = time.monotonic()
    metrics, advanced = lower_advance(setup)
    compiled = advanced.compile()
    evaluate = jax.jit(partial(_evaluate, setup), out_shardings=_everywhere(mesh))
    with in_mesh(mesh):
        evaluated = evaluate.lower(setup.step_data, setup.abstract, np.int32(0))
    check_metric(setup, evaluated.out_info)
    memory = compiled.memory_analysis()
    return RunProgram(
        setup=setup,
        metrics=metrics,
        advance_compiled=compiled,
        evaluate_compiled=evaluated.compile(),
        compile_seconds=time.monotonic() - start,
        temporary_bytes=None if memory is None else int(memory.temp_size_in_bytes),
    )


def lower_advance(setup: Setup) -> tuple[dict[str, jax.ShapeDtypeStruct], Any]:
    """The shapes of a step's metrics, and the lowered training step.

    Nothing is allocated if the setup is blank.
    """
    mesh, everywhere = setup.mesh, _everywhere(setup.mesh)
    metrics = jax.eval_shape(
        lambda data, state, key: setup.trainer(data).step(state, key)[1],
        setup.step_data,
        setup.abstract,
        jax.random.key(0),
    )
    carry = first_carry(0, setup.abstract, metrics)
    places = jax.tree.map(lambda x: x.sharding, setup.abstract)
    advance = jax.jit(
        partial(_chain if setup.chained else _step, setup),
        donate_argnums=4,
        out_shardings=None if mesh is None else Carry(everywhere, places, everywhere, everywhere),
    )
    last = [np.int32(0)] if setup.chained else []
    fixed = np.float32(0), setup.weights, np.uint32(0)
    with in_mesh(mesh):
        return metrics, advance.lower(setup.step_data, *fixed, carry, *last)


def _step(setup: Setup, data: Any, rate: Array, weights: Any, seed: Array, carry: Carry) -> Carry:
    """One step; after a loss that was not finite, steps no longer count."""
    _, key = _keys(seed)
    trainer = setup.trainer(data, rate, weights)
    state, metrics = trainer.step(carry.state, jax.random.fold_in(key, carry.step))
    totals = jax.tree.map(_add, carry.totals, metrics)
    finite = carry.finite & jnp.isfinite(metrics["loss"])
    return Carry(carry.step + carry.finite, state, totals, finite)


def _chain(
    setup: Setup, data: Any, rate: Array, weights: Any, seed: Array, carry: Carry, last: Array
) -> Carry:
    """Steps up to `last`, an argument, so that any number of steps shares one program."""
    return jax.lax.while_loop(
        lambda carry: (carry.step < last) & carry.finite,
        lambda carry: _step(setup, data, rate, weights, seed, carry),
        carry,
    )


def _evaluate(setup: Setup, data: Any, state: Any, number: Array) -> dict[str, Array]:
    """The validation metrics: of all batches or, without a chain, of that number alone."""
    key = jax.random.key(VALIDATION_KEY)
    if not setup.chained:
        key = jax.random.split(key, setup.config.evaluation_batches)[number]
    return setup.trainer(data).evaluate(state, key)


def _everywhere(mesh: Mesh | None) -> NamedSharding | None:
    return None if mesh is None else NamedSharding(mesh, P())


def _add(total: Array, value: Array) -> Array:
    return total + value if jnp.issubdtype(total.dtype, jnp.floating) else value


def _keys(seed: Array | int) -> tuple[Array, Array]:
    init_key, step_key = jax.random.split(jax.random.key(seed))
    return init_key, step_key


def describe(config: RunConfig) -> dict[str, Any]:
    """The sizes, bytes, tokens and learning rates of a run; raises if it cannot be built.

    The training step and the validation are traced with abstract arrays: shapes that do not fit
    raise, nothing is allocated or compiled. A rule file that does not exist yet is replaced by a
    shipped rule, and `optimizer` says so.

    >>> facts = describe(RunConfig("lm30m", "adamw"))
    >>> facts["parameters"], facts["tokens"]
    (49250304, 600047616)
    """
    config = resolve(config)
    name, rule = stand_in(config.optimizer) or (None, None)
    setup = set_up(config, blank=True, rule=rule)

    def step_and_validate(data, state, key):
        trainer = setup.trainer(data)
        return trainer.step(state, key)[0], trainer.evaluate(state, key)

    state, valid = jax.eval_shape(
        step_and_validate, setup.step_data, setup.abstract, jax.random.key(0)
    )
    _check_same_state(state, setup.abstract)
    check_metric(setup, valid)
    assert config.steps is not None
    tokens = setup.sizes["tokens_per_step"]
    updates = config.steps * setup.spec.updates_per_step
    return {
        "task": config.task,
        "optimizer": f"{config.label} ({name} for {config.optimizer}, which is not there yet)"
        if name
        else config.label,
        "steps": config.steps,
        "updates": updates,
        **setup.sizes,
        "parameter_bytes": count_bytes(setup.abstract.params),
        "tokens": None if tokens is None else tokens * config.steps,
        "metrics": sorted(valid),
        "rates": _rates(config, updates),
    }


def stand_in(optimizer: str) -> tuple[str, Rule] | None:
    """A name and a rule in place of a rule file that does not exist; None for other optimizers.

    It is celo2-base if "base" is in the path, since the size of the state depends on who updates
    what; the MLP's widths, the decays' values, form and norm change nothing that a dry run shows.
    For VeLO and Celo it is an untrained rule of the official size.

    >>> stand_in("runs/base-wide/rule.safetensors")[0]
    'celo2-base'
    """
    variant = find_variant(optimizer)
    if variant is None or optimizer in VARIANTS:
        return None
    if "://" in variant.rule or Path(variant.rule).exists():
        return None
    if variant.optimizer != "celo2":
        config = {"velo": VELO, "celo": CELO}[variant.optimizer]
        weights = initial_velo_weights(config, np.random.default_rng(0))
        return f"an untrained {variant.optimizer}", VeloRule(config, weights)
    name = "celo2-base" if "base" in variant.rule else "celo2"
    return name, as_rule(name)


def _rates(config: RunConfig, updates: int) -> dict[int, float]:
    """The learning rate at the first update, the end of the warm-up, half-way and the last."""
    shape = schedule_shape(config, updates)
    counts = sorted({0, round(config.warmup * updates), updates // 2, updates - 1})
    return {
        count: float(f"{config.learning_rate * np.asarray(shape(count)).item():.3g}")
        for count in counts
    }


def _check_same_state(after: Any, before: Any) -> None:
    """Raises a ValueError if a step changes the shapes or dtypes of its state."""
    ours, theirs = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (after, before))
    if ours != theirs:
        raise ValueError("the optimizer changes the shapes or dtypes of its state in a step.")
