"""A run's compiled parts: steps, chained in one call where that is faster, and a validation."""

import dataclasses
import time
from functools import lru_cache, partial
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from celo2.evaluate.config import RunConfig
from celo2.evaluate.setup import Setup, set_up

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
    finite: Array


class Program(NamedTuple):
    """A setup and its compiled functions, for any learning rate and seed."""

    setup: Setup
    metrics: dict[str, jax.ShapeDtypeStruct]  # of one step
    advance_compiled: Any  # data, learning rate, key, carry[, last] -> carry
    evaluate_compiled: Any  # data, state, key -> metrics
    compile_seconds: float
    temporary_bytes: int | None  # of a step, beside state and data

    def start(self, seed: int) -> Any:
        """The state before the first step."""
        init_key, _ = _keys(seed)
        state = self.setup.trainer(self.setup.data, 1.0).init(init_key)
        # Arrays of their own: two names for one array could not both be used up.
        return jax.tree.map(jnp.copy, state)

    def advance(self, config: RunConfig, state: Any, first: int, last: int) -> tuple[Any, Advanced]:
        """Steps from `first` to `last`, or until the loss is not finite. Uses up the state."""
        _, key = _keys(config.seed)
        call = partial(
            self.advance_compiled, self.setup.data, jnp.float32(config.learning_rate), key
        )
        carry = Carry(jnp.int32(first), state, _zeros(self.metrics), jnp.bool_(True))
        if self.setup.chained:
            carry = call(carry, jnp.int32(last))
        else:
            for _ in range(first, last):
                carry = call(carry)
                if not carry.finite:
                    break
        step = int(carry.step)
        told = jax.device_get((carry.totals, carry.state.optimizer.norms))
        totals, norms = jax.tree.map(lambda x: x.item(), told)
        means = {k: v / (step - first) if isinstance(v, float) else v for k, v in totals.items()}
        return carry.state, Advanced(step, bool(carry.finite), means, norms)

    def evaluate(self, state: Any) -> dict[str, float]:
        """The validation metrics."""
        key = jax.random.key(VALIDATION_KEY)
        keys = [key] if self.setup.chained else jax.random.split(key, self.setup.evaluations)
        found = [self.evaluate_compiled(self.setup.data, state, k) for k in keys]
        rows = [jax.tree.map(float, row) for row in found]
        return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def build(config: RunConfig, data: str | PathLike | None = None) -> Program:
    """The program of a resolved config; the newest are kept for configs that share one."""
    shared = dataclasses.replace(config, learning_rate=1.0, seed=0, label=None, record_every=1)
    return _build(shared, data)


@lru_cache(maxsize=16)
def _build(config: RunConfig, data: str | PathLike | None) -> Program:
    setup = set_up(config, data)
    start = time.monotonic()
    key, rate, count = jax.random.key(0), jnp.float32(1.0), jnp.int32(0)
    trainer = setup.trainer(setup.data, 1.0)
    metrics = jax.eval_shape(trainer.step, setup.abstract, key)[1]
    carry = Carry(count, setup.abstract, metrics, jnp.bool_(True))
    advance = partial(_chain if setup.chained else _step, setup)
    advanced = jax.jit(advance, donate_argnums=3).lower(
        setup.data, rate, key, carry, *([count] if setup.chained else [])
    )
    evaluate = jax.jit(lambda arrays, state, key: setup.trainer(arrays, 1.0).evaluate(state, key))
    compiled = advanced.compile()
    return Program(
        setup=setup,
        metrics=metrics,
        advance_compiled=compiled,
        evaluate_compiled=evaluate.lower(setup.data, setup.abstract, key).compile(),
        compile_seconds=time.monotonic() - start,
        temporary_bytes=_temporary_bytes(compiled),
    )


def _step(setup: Setup, data: Any, rate: Array, key: Array, carry: Carry) -> Carry:
    """One step."""
    trainer = setup.trainer(data, rate)
    state, metrics = trainer.step(carry.state, jax.random.fold_in(key, carry.step))
    totals = jax.tree.map(_add, carry.totals, metrics)
    return Carry(carry.step + 1, state, totals, jnp.isfinite(metrics["loss"]))


def _chain(setup: Setup, data: Any, rate: Array, key: Array, carry: Carry, last: Array) -> Carry:
    """Steps up to `last`, which is not compiled in: every step is the same, however many there
    are."""
    return jax.lax.while_loop(
        lambda carry: (carry.step < last) & carry.finite,
        lambda carry: _step(setup, data, rate, key, carry),
        carry,
    )


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


def _add(total: Array, value: Array) -> Array:
    return total + value if jnp.issubdtype(total.dtype, jnp.floating) else value


def _keys(seed: int) -> tuple[Array, Array]:
    init_key, step_key = jax.random.split(jax.random.key(seed))
    return init_key, step_key


def _temporary_bytes(compiled: Any) -> int | None:
    analysis = compiled.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)
