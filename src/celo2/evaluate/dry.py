"""A run built from shapes alone: what it would take, without data and without memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from celo2.evaluate.config import RunConfig, resolve
from celo2.evaluate.schedules import schedule_shape
from celo2.evaluate.setup import check_metric, count_bytes, set_up


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
    setup = set_up(replace(config, optimizer=rule or config.optimizer), blank=True)
    key = jax.random.key(0)
    step = jax.eval_shape(
        lambda d, s, k: setup.trainer(d, 1.0, setup.weights).step(s, k),
        setup.given,
        setup.abstract,
        key,
    )
    _check_same_state(step[0], setup.abstract)
    valid = jax.eval_shape(
        lambda d, s, k: setup.trainer(d, 1.0, setup.weights).evaluate(s, k),
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
    if not missing or Path(optimizer).exists():
        return None
    return "celo2-base" if "base" in optimizer else "celo2"


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
