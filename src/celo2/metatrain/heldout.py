"""A rule tried on problems it was not trained on, tuned like AdamW and Muon on the same."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from celo2.baselines import adamw, muon
from celo2.jax import celo2
from celo2.rule import ADAM_MULTIPLIER, Rule, RuleConfig
from celo2.tasks import TASKS, Task
from celo2.tasks.images import digits_convnet

Size = Literal["quick", "full"]

RATES = 5  # learning rates each optimizer is tuned over
WARMUP = 0.05  # of the steps
VALID_BATCHES = 16
SEED, VALID_SEED = 0, 1


def _by_size(quick: int, full: int) -> dict[Size, int]:
    return {"quick": quick, "full": full}


class Plan(NamedTuple):
    """A held-out problem before its data are loaded; `steps` and `seeds` by size."""

    make: Callable[[], Task]
    outputs: int  # classes or tokens
    steps: Mapping[Size, int]
    seeds: Mapping[Size, int]
    images: str | None = None  # the image set it trains on


# The digits' losses are small and differ from seed to seed: they are averages over several. A try
# takes a minute of one core after compiling, a quick one a quarter of that.
PLANS = {
    "mlp": Plan(TASKS["digits-mlp"].make, 10, _by_size(150, 300), _by_size(4, 8), "digits"),
    "wide-mlp": Plan(
        TASKS["digits-mlp-wide"].make, 10, _by_size(50, 100), _by_size(2, 6), "digits"
    ),
    "convnet": Plan(digits_convnet, 10, _by_size(60, 120), _by_size(4, 8), "digits"),
    "transformer": Plan(TASKS["text-tiny"].make, 256, _by_size(50, 200), _by_size(1, 1)),
}


@dataclass(frozen=True, eq=False)
class HeldOut:
    """A problem to try rules on; `worst` is what a diverged run's loss counts as."""

    name: str
    task: Task
    steps: int
    seeds: int
    worst: float


class Baseline(NamedTuple):
    """An optimizer to compare with, and the range of its learning rates."""

    make: Callable[[optax.Schedule], optax.GradientTransformation]
    rates: tuple[float, float]


def problems(names: Sequence[str] | None = None, size: Size = "full") -> dict[str, HeldOut]:
    """The held-out problems of that name, all by default.

    >>> list(problems())
    ['mlp', 'wide-mlp', 'convnet', 'transformer']
    """
    if size not in get_args(Size):
        raise ValueError(f"size={size!r} is not one of {', '.join(get_args(Size))}.")
    names = tuple(PLANS) if names is None else names
    if not names:
        raise ValueError(f"names is empty: name some of {', '.join(PLANS)}.")
    for name in names:
        if name not in PLANS:
            raise ValueError(f"{name!r} is not a held-out problem; there are {', '.join(PLANS)}.")
    return {name: _problem(name, size) for name in names}


def seen(names: Sequence[str], data: Sequence[str]) -> list[str]:
    """The problems that train on the images of a dataset in `data`, as meta-training did.

    >>> seen(["mlp", "transformer"], ["digits"])
    ['mlp']
    """
    return [name for name in names if name in PLANS and PLANS[name].images in data]


def try_rule(
    rule: Rule, problems: Mapping[str, HeldOut], stop: Callable[[], bool] = lambda: False
) -> dict[str, Any] | None:
    """How well `rule` trains each problem at its best learning rate, and the mean score.

    A problem's score is log(loss / AdamW's loss): below 0 is better than AdamW. Mean scores that
    differ by less than about 0.05 differ by chance. Another rule of the same config does not
    compile again. `stop` is asked before each problem; True gives the try up, and None comes back.

    >>> try_rule(rule, problems(("mlp",)))  # doctest: +SKIP
    {'score': -0.3, 'problems': {'mlp': {'loss': 0.05, 'rate': 0.002, 'rates': [...], ...}}}
    """
    results: dict[str, dict[str, Any]] = {}
    for name, problem in problems.items():
        if stop():
            return None
        results[name] = compare(problem, tune(problem, rule))
    score = sum(result["score"] for result in results.values()) / len(results)
    return {"score": score, "problems": results}


def compare(problem: HeldOut, result: dict[str, Any]) -> dict[str, Any]:
    """A result of `tune` with AdamW's loss on that problem, and the score against it."""
    adamw = tune(problem, "adamw")["loss"]
    return result | {"adamw": adamw, "score": math.log(result["loss"] / adamw)}


def tune(
    problem: HeldOut, optimizer: Rule | str, adam_multiplier: float = ADAM_MULTIPLIER
) -> dict[str, Any]:
    """The final validation loss of a rule or baseline at its best rate, that rate, and the curve.

    `adam_multiplier` is the rate of Adam's branch beside a rule, as a multiple of the rule's.
    `error` is the loss's standard error over seeds, None where there is one seed. Everything
    random has fixed seeds: the same rule gets the same result.
    """
    if isinstance(optimizer, str):
        return dict(_tune_baseline(problem, optimizer))
    return _tune(problem, optimizer.config, optimizer.weights, adam_multiplier)


@cache
def _tune_baseline(problem: HeldOut, name: str) -> dict[str, Any]:
    return _tune(problem, name, {})


def rates_of(kind: str | RuleConfig) -> list[float]:
    """The learning rates an optimizer is tuned over, log-spaced."""
    low, high = BASELINES[kind].rates if isinstance(kind, str) else RULE_RATES
    return [float(f"{rate:.3g}") for rate in np.geomspace(low, high, RATES)]


@cache
def _problem(name: str, size: Size) -> HeldOut:
    # Cached, since compiled programs and AdamW's results are kept by problem.
    plan = PLANS[name]
    return HeldOut(
        name, plan.make(), plan.steps[size], plan.seeds[size], 1.5 * math.log(plan.outputs)
    )


def _tune(
    problem: HeldOut,
    kind: str | RuleConfig,
    weights: Mapping[str, Any],
    adam_multiplier: float = ADAM_MULTIPLIER,
) -> dict[str, Any]:
    rates = rates_of(kind)
    weights = {name: jnp.asarray(w, jnp.float32) for name, w in weights.items()}
    keys = jax.random.split(jax.random.key(SEED), problem.seeds)
    starts = [problem.task.init(key) for key in keys]
    starts = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    program = _program(problem, kind, adam_multiplier)
    found = program(problem.task.data, starts, keys, weights, jnp.asarray(rates))
    losses = np.nan_to_num(np.asarray(found, np.float64), nan=np.inf)  # [rates, seeds]
    losses = np.minimum(losses, problem.worst)
    means = losses.mean(1).tolist()
    best = int(np.argmin(means))
    error = losses[best].std(ddof=1) / math.sqrt(problem.seeds) if problem.seeds > 1 else None
    return {
        "loss": means[best],
        "error": None if error is None else float(error),
        "rate": rates[best],
        "rates": rates,
        "losses": means,
    }


@cache
def _program(
    problem: HeldOut, kind: str | RuleConfig, adam_multiplier: float
) -> Callable[..., Array]:
    """data, starts, keys, weights, rates -> final validation losses [rates, seeds], compiled."""
    task = problem.task
    shape = _schedule(problem.steps)

    def final_loss(data, params, key: Array, weights, rate: Array) -> Array:
        tx = _optimizer(kind, weights, adam_multiplier, lambda count: rate * shape(count))

        def step(carry, key: Array):
            params, state = carry
            batch = task.sample(data, key, "train")
            grads, _ = jax.grad(task.loss, has_aux=True)(params, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(key, problem.steps)
        (params, _), _ = lax.scan(step, (params, tx.init(params)), keys)
        valid_keys = jax.random.split(jax.random.key(VALID_SEED), VALID_BATCHES)
        return jnp.mean(
            lax.map(lambda k: task.loss(params, task.sample(data, k, "valid"))[0], valid_keys)
        )

    # One after the other: batched kernels would make slow products on a CPU.
    @jax.jit
    def program(data, starts, keys, weights, rates):
        def at_rate(rate: Array) -> Array:
            return lax.map(lambda s: final_loss(data, s[0], s[1], weights, rate), (starts, keys))

        return lax.map(at_rate, rates)

    return program


def _schedule(steps: int) -> optax.Schedule:
    """Linear warm-up to 1, then cosine decay to zero."""
    return optax.warmup_cosine_decay_schedule(0.0, 1.0, max(1, round(WARMUP * steps)), steps)


def _optimizer(
    kind: str | RuleConfig,
    weights: Mapping[str, Array],
    adam_multiplier: float,
    schedule: optax.Schedule,
) -> optax.GradientTransformation:
    if isinstance(kind, str):
        return BASELINES[kind].make(schedule)
    return celo2(
        schedule,
        rule=Rule(kind, weights),
        adam_learning_rate=lambda count: adam_multiplier * schedule(count),
    )


# The best rates of runs this short; all ranges are equally wide.
RULE_RATES = (5e-4, 1e-2)
BASELINES = {
    "adamw": Baseline(adamw, (2e-3, 4e-2)),
    "muon": Baseline(muon, (4e-3, 8e-2)),
}
