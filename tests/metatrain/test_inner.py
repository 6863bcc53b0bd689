import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quadratics import RULE, WEIGHTS, quadratic, tiny_config

from celo2.jax import scale_by_celo2
from celo2.metatrain import inner
from celo2.metatrain.config import MetaConfig
from celo2.rule import Rule
from celo2.tasks.networks import init_mlp
from rules import jit, make_rule

TWINS = jax.tree.map(lambda w: jnp.stack([w, w]), WEIGHTS)
RATE = 0.01
BASE = dataclasses.replace(RULE, orthogonalize=False, vectors="rule")


def first_updates(tx, params, grads):
    return jit(lambda p, g: tx.update(g, tx.init(p), p)[0])(params, grads)


def mlp_problem():
    params = init_mlp(jax.random.key(0), (6, 5, 4))
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params)
    return params, grads


@pytest.fixture(scope="module")
def mlp_updates():
    """Celo2's first update of an MLP 6–5–4."""
    config = tiny_config(adam_multiplier=MetaConfig().adam_multiplier)
    return first_updates(
        inner.inner_optimizer(quadratic(config), WEIGHTS, lambda count: RATE), *mlp_problem()
    )


def advance(family):
    """Compiled: index and key of a problem's start, key of its batches -> start, moved, losses."""

    @jit
    def run(index, start_key, key):
        problem = inner.start(family, WEIGHTS, index, start_key)
        return problem, *inner.unroll(family, family.data, TWINS, problem, key)

    return run


def rms(x):
    return float(np.sqrt(np.mean(np.square(x))))


def test_biases_are_updated_by_uncorrected_adam_at_twenty_times_the_rate(mlp_updates):
    _, grads = mlp_problem()
    for layer in ("layer_0", "head"):
        g = np.asarray(grads[layer]["bias"])
        expected = -20 * RATE * 0.1 * g / np.sqrt(0.05 * g**2 + 1e-8)
        np.testing.assert_allclose(mlp_updates[layer]["bias"], expected, rtol=1e-5)


def test_uncorrected_adam_follows_its_formula_over_several_steps():
    tx = inner.uncorrected_adam()
    params = {"b": jnp.zeros(3)}
    state, m, v = tx.init(params), np.zeros(3), np.zeros(3)
    for i in range(4):
        g = np.random.default_rng(i).normal(size=3)
        step, state = tx.update({"b": jnp.asarray(g, jnp.float32)}, state)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        np.testing.assert_allclose(step["b"], m / np.sqrt(v + 1e-8), rtol=1e-4)


def test_hidden_and_head_kernels_are_updated_by_the_rule(mlp_updates):
    params, grads = (
        {name: layer["kernel"] for name, layer in tree.items()} for tree in mlp_problem()
    )
    alone = first_updates(scale_by_celo2(Rule(RULE, WEIGHTS)), params, grads)
    for layer in ("layer_0", "head"):
        kernel = mlp_updates[layer]["kernel"]
        np.testing.assert_allclose(kernel, -RATE * alone[layer], rtol=1e-3, atol=1e-6)
        assert rms(kernel) == pytest.approx(RATE, rel=1e-3)


def test_base_rule_updates_biases_too():
    family = quadratic(tiny_config(rule=BASE))
    tx = inner.inner_optimizer(family, make_rule(BASE).weights, lambda count: RATE)
    for update in jax.tree.leaves(first_updates(tx, *mlp_problem())):
        assert rms(update) == pytest.approx(RATE, rel=1e-3)


def test_losses_above_the_limit_and_not_finite_count_as_it_and_negative_ones_as_they_are():
    values = jnp.array([math.nan, math.inf, -math.inf, 0.8, 0.5, -1.0])
    family = quadratic(tiny_config(loss_limit=0.7), names=tuple("abcdef"))._replace(
        data=values, loss=lambda params, value: value + 0.0 * jnp.sum(params["head"]["bias"])
    )
    run = advance(family)
    key = jax.random.key(0)
    losses = [run(jnp.array(i), key, key)[2] for i in range(6)]
    expected = np.repeat([0.7, 0.7, 0.7, 0.7, 0.5, -1.0], 2).reshape(6, 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_default_limit_is_one_and_a_half_times_the_loss_of_guessing():
    assert quadratic().highest_loss == pytest.approx(1.5 * math.log(10))
    assert quadratic()._replace(classes=64).highest_loss == pytest.approx(1.5 * math.log(64))


def test_twins_start_alike_and_see_the_same_batches():
    run, zero = advance(quadratic(noise=1.0)), jnp.array(0)
    start, moved, losses = run(zero, jax.random.key(0), jax.random.key(1))
    assert losses[0] == losses[1]
    for before, after in zip(*map(jax.tree.leaves, (start.params, moved.params)), strict=True):
        np.testing.assert_array_equal(before[0], before[1])
        np.testing.assert_array_equal(after[0], after[1])
        assert not np.array_equal(before, after)
    assert (int(start.step), int(moved.step), int(moved.length)) == (0, 2, 8)
    assert run(zero, jax.random.key(0), jax.random.key(2))[2][0] != losses[0]


def test_lengths_are_log_uniform_multiples_of_the_truncation_within_bounds():
    config = tiny_config(truncation=50, unroll=(100, 2000))
    keys = jax.random.split(jax.random.key(0), 20_000)
    lengths = np.asarray(jax.vmap(lambda key: inner.sample_length(config, key))(keys))
    assert (lengths % 50 == 0).all()
    assert (lengths.min(), lengths.max()) == (100, 2000)
    for quantile in (0.25, 0.5, 0.75):
        expected = 100 * 20**quantile
        share = np.mean(lengths < 50 * round(expected / 50) - 25)
        cut = math.log((50 * round(expected / 50) - 25) / 100) / math.log(20)
        assert share == pytest.approx(cut, abs=0.015)


def test_fixed_unroll_has_that_length():
    config = tiny_config(truncation=5, unroll=(20, 20))
    lengths = jax.vmap(lambda key: inner.sample_length(config, key))(
        jax.random.split(jax.random.key(0), 50)
    )
    assert set(np.asarray(lengths).tolist()) == {20}
