"""A run built from shapes alone: what it would take, without data and without memory."""

from typing import Any

import jax
import numpy as np

from celo2.evaluate.config import RunConfig, resolve
from celo2.evaluate.schedules import schedule_shape
from celo2.evaluate.setup import count_bytes, set_up


def describe(config: RunConfig) -> dict[str, Any]:
    """What the run would be: sizes, bytes, tokens, learning rates; raises if it cannot be built.

    The training step and the validation are traced with abstract arrays: shapes that do not fit
    are found, nothing is allocated or compiled.

    >>> facts = describe(RunConfig("lm30m", "adamw"))
    >>> facts["parameters"], facts["tokens"]
    (49250304, 600047616)
    """
    config = resolve(config)
    setup = set_up(config, blank=True)
    key = jax.random.key(0)
    step = jax.eval_shape(
        lambda s, k: setup.trainer(setup.data, 1.0).step(s, k), setup.abstract, key
    )
    _check_same_state(step[0], setup.abstract)
    valid = jax.eval_shape(
        lambda s, k: setup.trainer(setup.data, 1.0).evaluate(s, k), setup.abstract, key
    )
    assert config.steps is not None
    tokens = setup.sizes["tokens_per_step"]
    updates = config.steps * setup.spec.updates_per_step
    return {
        "task": config.task,
        "optimizer": config.label,
        "steps": config.steps,
        "updates": updates,
        **setup.sizes,
        "parameter_bytes": count_bytes(setup.abstract.params),
        "tokens": None if tokens is None else tokens * config.steps,
        "metrics": sorted(valid),
        "rates": _rates(config, updates),
    }


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
