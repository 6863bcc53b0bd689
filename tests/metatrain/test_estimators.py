"""The estimators, held to gradients found by differentiating through the whole unroll."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quadratics import RULE, WEIGHTS, quadratic, tiny_config

from celo2.metatrain import estimators, inner, outer
from celo2.rule import make_odd, odd_features
from celo2.runs.processes import make_mesh
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


def gradient_of(found: estimators.Estimate):
    return jax.tree.map(lambda a, b: a + b, *found.halves)


def about_to_end(state: estimators.EstimatorState) -> estimators.EstimatorState:
    """All problems at their ends, so that the next estimate starts them anew."""
    return state._replace(problems=state.problems._replace(step=state.problems.length + 0))


@functools.cache
def compiled(estimator: str, unroll: tuple[int, int] = (8, 8), **changes):
    """The config and a compiled estimate of many pairs: state, key -> state, what was found.

    Without noise the problem is the same for every pair, and its gradient is known.
    """
    config = tiny_config(rule=SMOOTH, estimator=estimator, unroll=unroll, **changes)
    family = quadratic(config)
    numbers = jnp.arange(PAIRS)
    estimate = jit(
        lambda state, key: estimators.estimate(family, family.data, WEIGHTS, state, numbers, key)
    )
    return config, estimate


@functools.cache
def initial_state() -> estimators.EstimatorState:
    family = quadratic(tiny_config(rule=SMOOTH))
    return jit(lambda: estimators.init_state(family, WEIGHTS, jnp.arange(PAIRS), KEY))()


@functools.cache
def true_gradients() -> tuple[np.ndarray, np.ndarray]:
    """Of the mean loss over the whole unroll; and the same with each truncation's start held."""
    config = tiny_config(rule=SMOOTH)
    family = quadratic(config)

    def mean_loss(weights, held: float):
        def truncation(problem, _):
            start = jax.tree.map(lambda x: _hold(x, held), problem)
            moved, losses = inner.unroll(family, family.data, twice(weights), start, KEY)
            return moved, losses[0]

        problem = inner.start(family, WEIGHTS, jnp.array(0), KEY)
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
        total = total + flat(gradient_of(found))
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
    np.testing.assert_array_equal(*(flat(gradient_of(each)) for each in found))
    np.testing.assert_array_equal(*(each.losses for each in found))


def test_perturbation_has_the_configured_deviation():
    draw = jit(jax.vmap(lambda key: estimators.perturb(tiny_config(sigma=0.3), WEIGHTS, key)))
    noise = flat(draw(jax.random.split(KEY, 200)))
    assert noise.std() == pytest.approx(0.3, rel=0.03)
    assert noise.mean() == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("learn", ["all", "mix", "linear"])
def test_perturbations_of_odd_rules_are_odd_and_as_large(learn):
    config = tiny_config(sigma=0.3, odd=True, learn=learn)
    draw = jit(jax.vmap(lambda key: estimators.perturb(config, WEIGHTS, key)))
    noise = draw(jax.random.split(KEY, 200))
    one = {name: np.asarray(n[0]) for name, n in noise.items()}
    for name, n in make_odd(config.rule, one).items():
        np.testing.assert_allclose(n, one[name], atol=1e-6)
    learned = odd_features(config.rule) if learn == "linear" else slice(None)
    assert noise["w0"][:, learned, :2].std() == pytest.approx(0.3, rel=0.03)


def test_mix_is_the_first_layer_of_the_two_units_that_carry_it():
    weights = WEIGHTS | {"g0": WEIGHTS["w0"]}
    change = estimators.learned_part(
        tiny_config(learn="mix"), jax.tree.map(lambda w: jnp.ones(w.shape), weights)
    )
    learned = {name: np.argwhere(c).tolist() for name, c in change.items()}
    assert learned.pop("b0") == [[0], [1]]
    assert {unit for _, unit in learned.pop("w0")} == {0, 1}
    assert {unit for _, unit in learned.pop("g0")} == {0, 1}
    assert not any(learned.values())


def test_linear_mix_leaves_even_features_and_thresholds_alone():
    config = tiny_config(learn="linear")
    ones = jax.tree.map(lambda w: jnp.ones(w.shape), WEIGHTS)
    change = estimators.learned_part(config, ones)
    np.testing.assert_array_equal(change["w0"][:, 0] != 0, odd_features(config.rule))
    assert not any(change[name].any() for name in change if name != "w0")


def noise_of(config, number: int) -> np.ndarray:
    keys = jax.random.split(jax.random.fold_in(KEY, number), 3)
    return flat(estimators.perturb(config, WEIGHTS, keys[1]))


def with_sums(state: estimators.EstimatorState, ended: int) -> estimators.EstimatorState:
    """Problem `ended` at its end and all others at their start, with sums of ones."""
    steps = jnp.where(jnp.arange(len(state.problems.step)) == ended, state.problems.length, 0)
    ones = jax.tree.map(jnp.ones_like, state.perturbation)
    return estimators.EstimatorState(state.problems._replace(step=steps), ones)


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
    scale = np.abs(flat(gradient_of(first))).max()
    np.testing.assert_allclose(
        flat(gradient_of(whole)), flat(gradient_of(first)), rtol=1e-3, atol=1e-3 * scale
    )
    np.testing.assert_allclose(whole.losses, first.losses, rtol=1e-6)


def test_problems_begin_evenly_spread_over_their_unrolls():
    steps, counts = np.unique(initial_state().problems.step, return_counts=True)
    np.testing.assert_array_equal(steps, [0, 2, 4, 6])
    np.testing.assert_allclose(counts / PAIRS, 0.25, atol=0.05)


@pytest.fixture(scope="module")
def noisy():
    """Two tasks of two problems each, with random data: config, family, state and estimate."""
    config = tiny_config(rule=SMOOTH, problems=2)
    family = quadratic(config, noise=1.0, names=("one", "two"))
    program = outer.build(config, [family], make_mesh())
    state = program.init(WEIGHTS)
    # A copy, since the program uses up what it is given.
    problems = jax.tree.map(jnp.copy, state.problems[0])
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    numbers = jnp.arange(4)
    found = jit(
        lambda problems, key: estimators.estimate(
            family, family.data, WEIGHTS, problems, numbers, key
        )
    )(about_to_end(problems), key)[1]
    state = state._replace(problems=(about_to_end(state.problems[0]),))
    return config, family, key, found, program.run(state, 1)[1]


def test_meta_gradient_is_the_mean_over_all_problems(noisy):
    *_, found, metrics = noisy
    expected = np.linalg.norm(flat(gradient_of(found))) / 4
    np.testing.assert_allclose(metrics.gradient_norm, [expected], rtol=0.01)
    by_task = [np.mean(found.losses[i::2]) for i in (0, 1)]
    np.testing.assert_allclose(metrics.family_loss, [by_task], rtol=1e-4)
    np.testing.assert_allclose(metrics.loss, [np.mean(found.losses)], rtol=1e-4)


def test_pairs_share_starts_and_data_and_differ_in_the_sign_of_their_own_noise(noisy):
    config, family, key, found, _ = noisy

    @jit
    def pair(number):
        start_key, noise_key, data_key = jax.random.split(jax.random.fold_in(key, number), 3)
        noise = estimators.perturb(config, WEIGHTS, noise_key)
        problem = inner.start(family, WEIGHTS, number % 2, start_key)

        def loss(sign: float):
            weights = jax.tree.map(lambda w, e: w + sign * e, WEIGHTS, noise)
            twins = twice(weights)
            return inner.unroll(family, family.data, twins, problem, data_key)[1][0]

        losses = jax.lax.map(loss, jnp.array([1.0, -1.0]))
        slope = (losses[0] - losses[1]) / (2 * config.sigma**2)
        return jnp.mean(losses), jax.tree.map(lambda e: slope * e, noise)

    each = [pair(number) for number in range(4)]
    np.testing.assert_allclose(found.losses, [loss for loss, _ in each], rtol=1e-5)
    expected = sum(flat(gradient) for _, gradient in each)
    np.testing.assert_allclose(
        flat(gradient_of(found)), expected, rtol=0.01, atol=0.01 * np.abs(expected).max()
    )
    assert len({float(loss) for loss, _ in each}) == 4


def test_nres_is_unbiased():
    whole, _ = true_gradients()
    found = mean_estimate("nres")
    assert share(found, whole) == pytest.approx(1, abs=0.1)
    assert np.linalg.norm(found - whole) < 0.3 * np.linalg.norm(whole)


def test_nres_keeps_its_perturbation_until_the_unroll_ends():
    config, estimate = compiled("nres")
    state, _ = estimate(with_sums(initial_state(), ended=1), KEY)
    for number, expected in ((0, 1.0), (1, noise_of(config, 1)), (2, 1.0)):
        kept = flat(jax.tree.map(lambda x, n=number: x[n], state.perturbation))
        np.testing.assert_allclose(kept, np.broadcast_to(expected, kept.shape), atol=1e-6)


def test_late_weights_average_to_one_and_grow_with_the_step():
    config = tiny_config(late_weight=2.0, truncation=2)
    problem = inner.start(quadratic(config), WEIGHTS, jnp.array(0), KEY)
    steps = range(0, 200, 2)
    weights = [
        float(estimators.late_weight(config, problem._replace(step=t, length=200))) for t in steps
    ]
    assert np.mean(weights) == pytest.approx(1, abs=0.01)
    assert weights[-1] == pytest.approx(3 * 0.995**2, rel=1e-5) and weights[0] < 0.01


def test_meta_gradient_weighs_late_losses_more():
    _, plain = compiled("nres")
    _, late = compiled("nres", late_weight=1.0)
    start = about_to_end(initial_state())
    middle = 2 * (0 + 1) / 8  # (p + 1) · (middle of the first truncation) / length
    ratio = flat(gradient_of(late(start, KEY)[1])) / flat(gradient_of(plain(start, KEY)[1]))
    np.testing.assert_allclose(ratio, middle, rtol=1e-3)


# Through a part of the unroll, and through the whole.
@pytest.mark.parametrize("truncation", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_backprop_differentiates_the_end_of_an_unroll_through_its_last_steps(truncation):
    config = tiny_config(
        rule=SMOOTH, estimator="backprop", truncation=truncation, inner_decay="late", problems=2
    )
    family = quadratic(config)

    def loss_at_the_end(weights):
        problem = inner.start(family, WEIGHTS, jnp.array(0), KEY)
        carry = jax.tree.map(lambda x: x[0], (problem.params, problem.optimizer))

        def steps(carry, weights, count):
            def step(carry, _):
                return inner.train_step(family, weights, problem, *carry, family.data[0])[:2], None

            return jax.lax.scan(step, carry, length=count)[0]

        carry = jax.lax.stop_gradient(steps(carry, weights, 8 - truncation))
        params, _ = steps(carry, weights, truncation)
        return family.loss(params, family.data[0])

    loss, truth = jit(jax.value_and_grad(loss_at_the_end))(WEIGHTS)
    numbers = jnp.arange(2)
    state = jit(lambda: estimators.init_state(family, WEIGHTS, numbers, KEY))()
    state, found = jit(
        lambda state: estimators.estimate(family, family.data, WEIGHTS, state, numbers, KEY)
    )(state)
    np.testing.assert_allclose(found.losses, loss, rtol=1e-5)
    np.testing.assert_array_equal(found.steps, 8)
    expected = flat(truth) / np.linalg.norm(flat(truth))
    for half in found.halves:  # one problem each
        np.testing.assert_allclose(flat(half), expected, atol=1e-4)


def test_backprop_takes_a_gradient_that_is_not_finite_for_zero():
    config = tiny_config(rule=SMOOTH, estimator="backprop", truncation=8)
    family = quadratic(config)._replace(loss=lambda params, target: jnp.float32(jnp.nan) * target)
    problem = inner.start(family, WEIGHTS, jnp.array(0), KEY)
    gradient, loss = jit(
        lambda: estimators.differentiate(family, family.data, WEIGHTS, problem, KEY)
    )()
    assert not flat(gradient).any() and loss == family.highest_loss
