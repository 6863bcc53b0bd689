"""The estimators, held to gradients found by differentiating through the whole unroll."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quadratics import RULE, WEIGHTS, quadratic, tiny_config

from celo2.metatrain import inner, outer, pes
from rules import jit

PAIRS = 4096
# Without Newton–Schulz, which blows up the smallest singular values several hundredfold: the loss
# is then no longer smooth on the scale of the perturbations, and autodiff's gradient another one.
SMOOTH = dataclasses.replace(RULE, orthogonalize=False)
KEY = jax.random.key(5)


def twice(weights):
    return jax.tree.map(lambda w: jnp.stack([w, w]), weights)


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def about_to_end(state: pes.PESState) -> pes.PESState:
    """All problems at their ends, so that the next estimate starts them anew."""
    return state._replace(problems=state.problems._replace(step=state.problems.length + 0))


@functools.cache
def compiled(estimator: str, unroll: tuple[int, int] = (8, 8)):
    """The config and a compiled estimate of many pairs: state, key -> state, what was found.

    Without noise the problem is the same for every pair, and its gradient is known.
    """
    config, family = tiny_config(rule=SMOOTH, estimator=estimator, unroll=unroll), quadratic()
    numbers = jnp.arange(PAIRS)
    estimate = jit(
        lambda state, key: pes.estimate(config, family, family.data, WEIGHTS, state, numbers, key)
    )
    return config, estimate


@functools.cache
def initial_state() -> pes.PESState:
    config, family = tiny_config(rule=SMOOTH), quadratic()
    return jit(lambda: pes.init_state(config, family, WEIGHTS, jnp.arange(PAIRS), KEY))()


@functools.cache
def true_gradients() -> tuple[np.ndarray, np.ndarray]:
    """Of the mean loss over the whole unroll; and the same with each truncation's start held."""
    config, family = tiny_config(rule=SMOOTH), quadratic()

    def mean_loss(weights, held: float):
        def truncation(problem, _):
            start = jax.tree.map(lambda x: _hold(x, held), problem)
            moved, losses = inner.unroll(config, family, family.data, twice(weights), start, KEY)
            return moved, losses[0]

        problem = inner.start(config, family, WEIGHTS, jnp.array(0), KEY)
        truncations = config.unroll[0] // config.truncation
        return jnp.mean(jax.lax.scan(truncation, problem, length=truncations)[1])

    gradient = jit(jax.grad(mean_loss))
    return flat(gradient(WEIGHTS, 0.0)), flat(gradient(WEIGHTS, 1.0))


def _hold(x, held):
    """`x`, whose derivative is multiplied by 1 - held."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return held * jax.lax.stop_gradient(x) + (1 - held) * x


def mean_estimate(estimator: str) -> np.ndarray:
    """The mean gradient of many pairs over one whole unroll, the rule's weights held."""
    config, estimate = compiled(estimator)
    state = about_to_end(initial_state())
    iterations = 1 if estimator == "full_es" else config.unroll[0] // config.truncation
    total = 0.0
    for i in range(iterations):
        state, found = estimate(state, jax.random.fold_in(KEY, i))
        total = total + flat(found.gradient)
    return total / (PAIRS * iterations)


def share(estimate: np.ndarray, truth: np.ndarray) -> float:
    """How much of `truth` is in `estimate`: 1 if unbiased, with an error of a few hundredths."""
    return float(estimate @ truth / (truth @ truth))


def test_pes_is_unbiased():
    whole, _ = true_gradients()
    found = mean_estimate("pes")
    assert share(found, whole) == pytest.approx(1, abs=0.1)
    assert np.linalg.norm(found - whole) < 0.3 * np.linalg.norm(whole)


def test_full_es_is_unbiased():
    whole, _ = true_gradients()
    found = mean_estimate("full_es")
    assert share(found, whole) == pytest.approx(1, abs=0.1)
    assert np.linalg.norm(found - whole) < 0.3 * np.linalg.norm(whole)


def test_truncated_es_is_biased_as_if_truncations_started_from_nowhere():
    whole, held = true_gradients()
    found = mean_estimate("truncated_es")
    assert share(found, held) == pytest.approx(1, abs=0.1)
    assert share(found, whole) < 0.3


def test_truncated_es_starts_both_twins_where_the_first_one_is():
    _, estimate = compiled("truncated_es")
    state, _ = estimate(about_to_end(initial_state()), KEY)
    first, second = (np.asarray(state.problems.params["hidden"]["kernel"])[:, i] for i in (0, 1))
    assert not np.array_equal(first, second)
    kept = jax.tree.map(lambda x: x.at[:, 1].set(x[:, 0]), state.problems.params)
    far = jax.tree.map(lambda x: x.at[:, 1].add(1), state.problems.params)
    found = [
        estimate(state._replace(problems=state.problems._replace(params=params)), KEY)[1]
        for params in (kept, far)
    ]
    np.testing.assert_array_equal(*(flat(each.gradient) for each in found))
    np.testing.assert_array_equal(*(each.losses for each in found))


def test_perturbation_has_the_configured_deviation():
    draw = jit(jax.vmap(lambda key: pes.perturb(tiny_config(sigma=0.3), WEIGHTS, key)))
    noise = flat(draw(jax.random.split(KEY, 200)))
    assert noise.std() == pytest.approx(0.3, rel=0.03)
    assert noise.mean() == pytest.approx(0, abs=0.01)


def noise_of(config, number: int) -> np.ndarray:
    keys = jax.random.split(jax.random.fold_in(KEY, number), 3)
    return flat(pes.perturb(config, WEIGHTS, keys[1]))


def with_sums(state: pes.PESState, ended: int) -> pes.PESState:
    """Problem `ended` at its end and all others at their start, with sums of ones."""
    steps = jnp.where(jnp.arange(len(state.problems.step)) == ended, state.problems.length, 0)
    ones = jax.tree.map(jnp.ones_like, state.perturbation)
    return pes.PESState(state.problems._replace(step=steps), ones)


@pytest.mark.parametrize(("estimator", "carried"), [("pes", 1.0), ("truncated_es", 0.0)])
def test_accumulators_grow_in_an_unroll_and_restart_with_it(estimator, carried):
    config, estimate = compiled(estimator)
    state, _ = estimate(with_sums(initial_state(), ended=1), KEY)
    for number, old in ((0, carried), (1, 0.0), (2, carried)):
        sums = flat(jax.tree.map(lambda x, n=number: x[n], state.perturbation))
        np.testing.assert_allclose(sums, old + noise_of(config, number), atol=1e-6)
    np.testing.assert_array_equal(state.problems.step, 2)


def test_full_es_equals_pes_where_one_truncation_is_the_whole_unroll():
    start = about_to_end(initial_state())
    _, first = compiled("pes")[1](start, KEY)
    _, whole = compiled("full_es", unroll=(2, 2))[1](start, KEY)
    scale = np.abs(flat(first.gradient)).max()
    np.testing.assert_allclose(
        flat(whole.gradient), flat(first.gradient), rtol=1e-3, atol=1e-3 * scale
    )
    np.testing.assert_allclose(whole.losses, first.losses, rtol=1e-6)


def test_problems_begin_evenly_spread_over_their_unrolls():
    steps, counts = np.unique(initial_state().problems.step, return_counts=True)
    np.testing.assert_array_equal(steps, [0, 2, 4, 6])
    np.testing.assert_allclose(counts / PAIRS, 0.25, atol=0.05)


@pytest.fixture(scope="module")
def noisy():
    """Two tasks of two problems each, with random data: config, family, state and estimate."""
    config, family = (
        tiny_config(rule=SMOOTH, problems=2),
        quadratic(noise=1.0, names=("one", "two")),
    )
    program = outer.build(config, family, outer.make_mesh())
    state = program.init(WEIGHTS)
    # A copy, since the program uses up what it is given.
    problems = jax.tree.map(jnp.copy, state.pes)
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    numbers = jnp.arange(4)
    found = jit(
        lambda problems, key: pes.estimate(
            config, family, family.data, WEIGHTS, problems, numbers, key
        )
    )(about_to_end(problems), key)[1]
    state = state._replace(pes=about_to_end(state.pes))
    return config, family, key, found, program.run(state, 1)[1]


def test_meta_gradient_is_the_mean_over_all_problems(noisy):
    *_, found, metrics = noisy
    expected = np.linalg.norm(flat(found.gradient)) / 4
    np.testing.assert_allclose(metrics.gradient_norm, [expected], rtol=0.01)
    by_task = [np.mean(found.losses[i::2]) for i in (0, 1)]
    np.testing.assert_allclose(metrics.family_loss, [by_task], rtol=1e-4)
    np.testing.assert_allclose(metrics.loss, [np.mean(found.losses)], rtol=1e-4)


def test_pairs_share_starts_and_data_and_differ_in_the_sign_of_their_own_noise(noisy):
    config, family, key, found, _ = noisy

    @jit
    def pair(number):
        start_key, noise_key, data_key = jax.random.split(jax.random.fold_in(key, number), 3)
        noise = pes.perturb(config, WEIGHTS, noise_key)
        problem = inner.start(config, family, WEIGHTS, number % 2, start_key)

        def loss(sign: float):
            weights = jax.tree.map(lambda w, e: w + sign * e, WEIGHTS, noise)
            twins = twice(weights)
            return inner.unroll(config, family, family.data, twins, problem, data_key)[1][0]

        losses = jax.lax.map(loss, jnp.array([1.0, -1.0]))
        slope = (losses[0] - losses[1]) / (2 * config.sigma**2)
        return jnp.mean(losses), jax.tree.map(lambda e: slope * e, noise)

    each = [pair(number) for number in range(4)]
    np.testing.assert_allclose(found.losses, [loss for loss, _ in each], rtol=1e-5)
    expected = sum(flat(gradient) for _, gradient in each)
    np.testing.assert_allclose(
        flat(found.gradient), expected, rtol=0.01, atol=0.01 * np.abs(expected).max()
    )
    assert len({float(loss) for loss, _ in each}) == 4
