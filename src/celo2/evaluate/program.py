"""A run's compiled parts: steps, chained in one call where that is faster, and a validation."""

import dataclasses
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from celo2.evaluate.config import RunConfig, resolve, shared_name, split_lstm
from celo2.evaluate.optimizers import load_rule, schedule_shape
from celo2.evaluate.setup import Batches, Setup, check_metric, count_bytes, place_weights, set_up
from celo2.rule import Rule
from celo2.rulefile import digest
from celo2.velo import CELO, VELO, VeloRule, initial_weights

KEPT = 16  # programs
_programs: dict[Any, "Program"] = {}  # the newest last
VALIDATION_KEY = 1  # the same in every run: all are judged by the same batches


class Advanced(NamedTuple):
    """What steps came to: the last one made, and whether its loss was finite.

    Metrics are means over the steps, of integers the last; norms are those of the last update.
    """

    step: int
    finite: bool
    metrics: dict[str, float]
    norms: dict[str, dict[str, float]]


class Carry(NamedTuple):
    """What goes from step to step on the device."""

    step: Array
    state: Any
    totals: dict[str, Array]  # of the metrics since the call began
    finite: Array  # whether every loss was


class Program(NamedTuple):
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
            return self.setup.trainer(self.setup.given).init(_keys(seed)[0])

        if self.setup.mesh is None:
            # Arrays of their own: two names for one array could not both be used up.
            return jax.tree.map(jnp.copy, init(seed))
        places = jax.tree.map(lambda x: x.sharding, self.setup.abstract)
        return jax.jit(init, out_shardings=places)(self._put(seed, jnp.uint32))

    def batches(self, seed: int) -> Batches:
        """The data of the steps of a run with that seed."""
        return Batches(self.setup.data, "train", seed, self.setup.mesh)

    def advance(
        self, config: RunConfig, batches: Batches, state: Any, first: int, last: int
    ) -> tuple[Any, Advanced]:
        """Steps from `first` to `last`, or until the loss is not finite. Uses up the state."""
        rate = self._put(config.learning_rate, jnp.float32)
        seed = self._put(config.seed, jnp.uint32)
        totals = jax.tree.map(lambda x: self._put(np.zeros(x.shape), x.dtype), self.metrics)
        carry = Carry(self._put(first, jnp.int32), state, totals, self._put(True, jnp.bool_))
        if self.setup.chained:
            last_step = self._put(last, jnp.int32)
            carry = self.advance_compiled(
                batches.at(first), rate, self.setup.weights, seed, carry, last_step
            )
        else:
            for step in range(first, last):
                carry = self.advance_compiled(
                    batches.at(step), rate, self.setup.weights, seed, carry
                )
                # Many collectives in a queue may block each other on CPU devices.
                if jax.default_backend() == "cpu" and not carry.finite:
                    break
        step = int(carry.step)
        told = jax.device_get((carry.totals, carry.state.optimizer.norms))
        totals, norms = jax.tree.map(lambda x: x.item(), told)
        means = {k: v / (step - first) if isinstance(v, float) else v for k, v in totals.items()}
        return carry.state, Advanced(step, bool(carry.finite), means, norms)

    def evaluate(self, state: Any) -> dict[str, float]:
        """The validation metrics."""
        batches = Batches(self.setup.data, "valid", VALIDATION_KEY, self.setup.mesh)
        calls = range(1 if self.setup.chained else self.setup.evaluations)
        numbers = [self._put(i, jnp.int32) for i in calls]
        found = [self.evaluate_compiled(batches.at(i), state, numbers[i]) for i in calls]
        rows = [jax.tree.map(float, jax.device_get(row)) for row in found]
        return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}

    def _put(self, value: Any, dtype: Any) -> Array:
        return put(value, dtype, self.setup.mesh)


def build(
    config: RunConfig, data: str | PathLike | None = None, mesh: Mesh | None = None
) -> Program:
    """The program of a resolved config; the newest are kept for configs that share one.

    Rules of one RuleConfig share it too, whatever their weights.
    """
    rule = load_rule(config.optimizer)
    shared = dataclasses.replace(
        config,
        optimizer=shared_name(config.optimizer),
        learning_rate=1.0,
        seed=0,
        label=None,
        record_every=1,
    )
    key = (shared, None if rule is None else rule.config, data, mesh)
    program = _programs.pop(key, None) or _build(shared, rule, data, mesh)
    _programs[key] = program
    while len(_programs) > KEPT:
        del _programs[next(iter(_programs))]
    if rule is None:
        return program
    mine = {"rule": digest(rule), "weights": place_weights(rule, mesh)}
    return program._replace(setup=program.setup._replace(**mine))


def _build(
    config: RunConfig, rule: Rule | None, data: str | PathLike | None, mesh: Mesh | None
) -> Program:
    setup = set_up(config, data, mesh, rule=rule)
    start = time.monotonic()
    metrics, advanced = lower_advance(setup)
    compiled = advanced.compile()
    evaluate = jax.jit(partial(_evaluate, setup), out_shardings=_everywhere(mesh))
    number = put(0, jnp.int32, mesh)
    with in_mesh(mesh):
        evaluated = evaluate.lower(setup.given, setup.abstract, number)
    check_metric(setup, evaluated.out_info)
    return Program(
        setup=setup,
        metrics=metrics,
        advance_compiled=compiled,
        evaluate_compiled=evaluated.compile(),
        compile_seconds=time.monotonic() - start,
        temporary_bytes=_temporary_bytes(compiled),
    )


def lower_advance(setup: Setup) -> tuple[dict[str, jax.ShapeDtypeStruct], Any]:
    """The shapes of a step's metrics, and the training step ready to be compiled.

    Nothing is allocated if the setup was made without data.
    """
    mesh = setup.mesh
    rate, seed, count = (put(0, dtype, mesh) for dtype in (jnp.float32, jnp.uint32, jnp.int32))
    metrics = jax.eval_shape(
        lambda data, state, key: setup.trainer(data).step(state, key)[1],
        setup.given,
        setup.abstract,
        jax.random.key(0),
    )
    totals = jax.tree.map(lambda x: put(np.zeros(x.shape), x.dtype, mesh), metrics)
    carry = Carry(count, setup.abstract, totals, put(True, jnp.bool_, mesh))
    places = None
    if mesh is not None:
        places = jax.tree.map(lambda x: x.sharding, carry)
    advance = jax.jit(
        partial(_chain if setup.chained else _step, setup), donate_argnums=4, out_shardings=places
    )
    last = [count] if setup.chained else []
    with in_mesh(mesh):
        return metrics, advance.lower(setup.given, rate, setup.weights, seed, carry, *last)


def in_mesh(mesh: Mesh | None) -> AbstractContextManager:
    """Where optimizers find the mesh, to choose what its devices share."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def put(value: Any, dtype: Any, mesh: Mesh | None) -> Array:
    """A small array on every device."""
    array = np.asarray(value, dtype)
    if mesh is None:
        return jnp.asarray(array)
    everywhere = NamedSharding(mesh, P())
    return jax.make_array_from_callback(array.shape, everywhere, lambda index: array[index])


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
    """Steps up to `last`, which is not compiled in: every step is the same, however many there
    are."""
    return jax.lax.while_loop(
        lambda carry: (carry.step < last) & carry.finite,
        lambda carry: _step(setup, data, rate, weights, seed, carry),
        carry,
    )


def _evaluate(setup: Setup, data: Any, state: Any, number: Array) -> dict[str, Array]:
    """The validation, or that number of its batches if they come one by one."""
    key = jax.random.key(VALIDATION_KEY)
    if not setup.chained:
        key = jax.random.split(key, setup.evaluations)[number]
    return setup.trainer(data).evaluate(state, key)


def _everywhere(mesh: Mesh | None) -> NamedSharding | None:
    return None if mesh is None else NamedSharding(mesh, P())


def _add(total: Array, value: Array) -> Array:
    return total + value if jnp.issubdtype(total.dtype, jnp.floating) else value


def _keys(seed: Array | int) -> tuple[Array, Array]:
    init_key, step_key = jax.random.split(jax.random.key(seed))
    return init_key, step_key


def _temporary_bytes(compiled: Any) -> int | None:
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


def describe(config: RunConfig) -> dict[str, Any]:
    """What the run would be: sizes, bytes, tokens, learning rates; raises if it cannot be built.

    The training step and the validation are traced with abstract arrays: shapes that do not fit
    are found, nothing is allocated or compiled. A rule file may be missing still: a shipped rule
    then stands in for it, and `optimizer` says so.

    >>> facts = describe(RunConfig("lm30m", "adamw"))
    >>> facts["parameters"], facts["tokens"]
    (49250304, 600047616)
    """
    config = resolve(config)
    rule = stand_in(config.optimizer)
    setup = set_up(
        replace(config, optimizer=rule or config.optimizer),
        blank=True,
        rule=untrained_rule(config.optimizer),
    )
    key = jax.random.key(0)
    step = jax.eval_shape(
        lambda d, s, k: setup.trainer(d).step(s, k),
        setup.given,
        setup.abstract,
        key,
    )
    _check_same_state(step[0], setup.abstract)
    valid = jax.eval_shape(
        lambda d, s, k: setup.trainer(d).evaluate(s, k),
        setup.given,
        setup.abstract,
        key,
    )
    check_metric(setup, valid)
    assert config.steps is not None
    tokens = setup.sizes["tokens_per_step"]
    updates = config.steps * setup.spec.updates_per_step
    return {
        "task": config.task,
        "optimizer": f"{config.label} ({rule} for {config.optimizer}, which is not there yet)"
        if rule
        else config.label,
        "steps": config.steps,
        "updates": updates,
        **setup.sizes,
        "parameter_bytes": count_bytes(setup.abstract.params),
        "tokens": None if tokens is None else tokens * config.steps,
        "metrics": sorted(valid),
        "rates": _rates(config, updates),
    }


def stand_in(optimizer: str) -> str | None:
    """The shipped rule for a rule file that is not there yet; None for any other optimizer.

    Celo2-base, if "base" is in the path: who updates what decides the size of the state. The
    MLP's widths, the decays' values, form and norm change nothing that a dry run shows.

    >>> stand_in("runs/base-wide/rule.safetensors")
    'celo2-base'
    """
    missing = optimizer.endswith(".safetensors") and "://" not in optimizer
    if not missing or Path(optimizer).exists() or split_lstm(optimizer):
        return None
    return "celo2-base" if "base" in optimizer else "celo2"


def untrained_rule(optimizer: str) -> VeloRule | None:
    """A rule of the official size for `velo=FILE` or `celo=FILE` whose file is not there yet."""
    lstm = split_lstm(optimizer)
    if lstm is None or "://" in lstm[1] or Path(lstm[1]).exists():
        return None
    config = {"velo": VELO, "celo": CELO}[lstm[0]]
    return VeloRule(config, initial_weights(config, np.random.default_rng(0)))


def _rates(config: RunConfig, updates: int) -> dict[int, float]:
    """The learning rate at a few updates: first, end of the warm-up, half-way, last."""
    shape = schedule_shape(config, updates)
    counts = sorted({0, round(config.warmup * updates), updates // 2, updates - 1})
    return {
        count: float(f"{config.learning_rate * np.asarray(shape(count)).item():.3g}")
        for count in counts
    }


def _check_same_state(after: Any, before: Any) -> None:
    """A step must not change its state's shapes, or it could not be repeated."""
    ours, theirs = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (after, before))
    if ours != theirs:
        raise ValueError("the optimizer changes the shapes or dtypes of its state in a step.")
