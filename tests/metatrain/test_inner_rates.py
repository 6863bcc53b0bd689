import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quadratics import WEIGHTS, quadratic, tiny_config

from celo2.metatrain import estimators, inner
from celo2.metatrain.config import MetaConfig
from rules import jit

TWINS = jax.tree.map(lambda w: jnp.stack([w, w]), WEIGHTS)
RATES = (1e-3, 1e-1)


def step_sizes(config, steps: int, seed: int = 5):
    """A problem, and the RMS of the steps its hidden kernel takes, in units of the task."""
    family = quadratic(config)

    @jit
    def run(key):
        def advance(problem, key):
            moved, _ = inner.unroll(family, family.data, TWINS, problem, key)
            step = moved.params["hidden"]["kernel"] - problem.params["hidden"]["kernel"]
            return moved, jnp.sqrt(jnp.mean(jnp.square(step[0])))

        problem = inner.start(family, WEIGHTS, jnp.array(0), key)
        _, sizes = jax.lax.scan(advance, problem, jax.random.split(key, steps))
        return problem, sizes * problem.scales["hidden"]["kernel"]

    return run(jax.random.key(seed))


def test_rate_is_the_config_s_and_constant_by_default():
    problem, sizes = step_sizes(tiny_config(truncation=1), 8)
    assert float(problem.rate) == pytest.approx(0.1)
    np.testing.assert_allclose(sizes, 0.1, rtol=1e-3)


def test_cosine_decay_lowers_the_rate_over_each_unroll():
    _, sizes = step_sizes(tiny_config(truncation=1, inner_decay="cosine"), 8)
    expected = 0.1 * 0.5 * (1 + np.cos(np.pi * np.arange(8) / 8))
    np.testing.assert_allclose(sizes, expected, rtol=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_drawn_rates_move_the_task_s_weights_alike_at_every_scale(seed):
    config = tiny_config(
        truncation=1,
        augmentation="global",
        augmentation_range=(1e-2, 1e2),
        inner_rates=(0.05, 0.05),
    )
    problem, sizes = step_sizes(config, 4, seed)
    scale = float(problem.scales["hidden"]["kernel"])
    assert not 0.9 < scale < 1.1
    assert float(problem.rate) * scale == pytest.approx(0.05)
    np.testing.assert_allclose(sizes, 0.05, rtol=1e-3)


def test_drawn_rates_are_log_uniform_in_their_range():
    config = tiny_config(inner_rates=RATES)
    keys = jax.random.split(jax.random.key(0), 4000)
    rates = jax.vmap(lambda key: inner.sample_rate(config, key, jnp.ones(())))(keys)
    shares, _ = np.histogram(np.log10(rates), bins=4, range=(-3.001, -0.999))
    np.testing.assert_allclose(shares / len(keys), 0.25, atol=0.03)


def test_full_es_decays_over_the_length_all_problems_share():
    config = tiny_config(
        estimator="full_es", problems=3, unroll=(2, 40), inner_decay="cosine", inner_rates=RATES
    )
    family, numbers = quadratic(config), jnp.arange(3)

    @jit
    def run(key):
        state = estimators.init_state(family, WEIGHTS, numbers, key)
        return estimators.estimate(family, family.data, WEIGHTS, state, numbers, key)

    state, found = run(jax.random.key(2))
    assert len(set(found.steps.tolist())) == 1
    np.testing.assert_array_equal(state.problems.length, found.steps)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inner_rates": (0.1, 0.01)}, r"inner_rates=\(0.1, 0.01\) must be 0 < low ≤ high"),
        ({"inner_rates": (0.0, 0.1)}, "inner_rates=.* must be 0 < low"),
        ({"inner_rates": RATES, "augmentation": "tensor"}, "none or global, not tensor"),
        ({"inner_decay": "linear"}, "inner_decay='linear' is not one of constant, cosine"),
    ],
)
def test_mistakes_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        MetaConfig(**fields)
