import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quadratics import WEIGHTS, quadratic, tiny_config

from celo2.metatrain import inner
from rules import jit

LEVELS = ("none", "global", "tensor", "parameter")
BOUNDS = (1e-3, 1e3)
PARAMS = {"kernel": jnp.ones((40, 50)), "bias": jnp.ones(50), "gain": jnp.ones(())}


def scales_at(level: str, seed: int = 0, params=PARAMS):
    return inner.sample_scales(level, BOUNDS, jax.random.key(seed), params)


@pytest.mark.parametrize("level", LEVELS)
def test_problem_starts_at_the_same_function_at_every_level(level):
    family, key = quadratic(tiny_config(augmentation=level), noise=0.5), jax.random.key(7)
    start = jit(lambda key: inner.start(family, WEIGHTS, jnp.array(0), key))
    problem, plain = start(key), family.init(jax.random.split(key, 3)[0])
    for twin in (0, 1):
        trained = jax.tree.map(lambda p, twin=twin: p[twin], problem.params)
        seen = inner.expand(trained, problem.scales)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), seen, plain)
        rescaled = not np.allclose(trained["hidden"]["kernel"], plain["hidden"]["kernel"])
        assert rescaled == (level != "none")


def test_unroll_sees_the_function_and_not_the_rescaled_parameters():
    family = quadratic(tiny_config(truncation=1, unroll=(1, 1), augmentation="parameter"))

    @jit
    def first_losses(key):
        problem = inner.start(family, WEIGHTS, jnp.array(0), key)
        twins = jax.tree.map(lambda w: jnp.stack([w, w]), WEIGHTS)
        return inner.unroll(family, family.data, twins, problem, key)[1]

    plain = family.loss(family.init(jax.random.key(0)), family.data[0])
    np.testing.assert_allclose(first_losses(jax.random.key(7)), [plain, plain], rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_scale_changes_the_gradient_and_not_the_function(level):
    family = quadratic()
    params = family.init(jax.random.key(0))
    scales = scales_at(level, params=params)
    target = family.data[0]

    def of_trained(trained):
        return family.loss(inner.expand(trained, scales), target)

    trained = inner.shrink(params, scales)
    np.testing.assert_allclose(of_trained(trained), family.loss(params, target), rtol=1e-5)
    expected = inner.expand(jax.grad(family.loss)(params, target), scales)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4),
        jax.grad(of_trained)(trained),
        expected,
    )


def test_level_none_leaves_the_parameters_as_they_are():
    shrunk = inner.shrink(PARAMS, scales_at("none"))
    jax.tree.map(np.testing.assert_array_equal, shrunk, PARAMS)


def test_global_level_has_one_scale_for_all():
    assert len({float(s) for s in jax.tree.leaves(scales_at("global"))}) == 1
    assert float(scales_at("global")["bias"]) != float(scales_at("global", seed=1)["bias"])


def test_tensor_level_has_one_scale_for_each_tensor():
    scales = jax.tree.leaves(scales_at("tensor"))
    assert all(s.shape == () for s in scales)
    assert len(set(map(float, scales))) == len(scales)


def test_parameter_level_has_one_scale_for_each_number():
    scales = scales_at("parameter")
    jax.tree.map(lambda s, p: np.testing.assert_equal(s.shape, p.shape), scales, PARAMS)
    assert len(np.unique(scales["kernel"])) > 1900  # of 2,000; some floats may coincide


@pytest.mark.parametrize("level", LEVELS[1:])
def test_scales_are_log_uniform_in_the_bounds(level):
    draw = jax.vmap(lambda key: inner.sample_scales(level, BOUNDS, key, PARAMS)["bias"])
    logs = np.log10(np.ravel(draw(jax.random.split(jax.random.key(3), 4000))))
    assert logs.min() >= -3 - 1e-4 and logs.max() <= 3 + 1e-4
    shares, _ = np.histogram(logs, bins=6, range=(-3.001, 3.001))
    np.testing.assert_allclose(shares / len(logs), 1 / 6, atol=0.025)
