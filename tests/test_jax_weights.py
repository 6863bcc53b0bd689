"""The transform as a function of its rule's weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from celo2.jax import celo2, scale_by_celo2
from celo2.jax.update import newton_schulz
from celo2.rule import CELO2, Rule, initial_weights
from rules import SMALL, jit, make_rule, normal_tree

RULE = make_rule()
SHAPES = {"kernel": (4, 6), "bias": (6,)}
PARAMS = normal_tree(SHAPES, seed=1, scale=0.3)
GRADS = normal_tree({name: (3, *shape) for name, shape in SHAPES.items()}, seed=2, scale=0.1)


def test_gradient_with_respect_to_the_rule_s_weights_is_right():
    weights = jax.tree.map(jnp.asarray, dict(RULE.weights))

    def loss(weights):
        tx = celo2(0.1, rule=Rule(SMALL, weights))

        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (jax.tree.map(jnp.add, params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), GRADS)
        return jnp.sum(jnp.sin(params["kernel"]))

    gradient = jit(jax.grad(loss))(weights)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    assert all(gradient[name].any() for name in ("w0", "b0", "w1", "b1"))
    value = jit(loss)
    direction = normal_tree(jax.tree.map(jnp.shape, weights), seed=9)

    def along(distance):
        return value(jax.tree.map(lambda w, d: w + distance * d, weights, direction))

    expected = sum(jnp.sum(gradient[k] * direction[k]) for k in weights)
    assert (along(1e-3) - along(-1e-3)) / 2e-3 == pytest.approx(float(expected), rel=0.05)


def test_rule_that_starts_at_momentum_orthogonalizes_the_momentum():
    rule = Rule(CELO2, initial_weights(CELO2, np.random.default_rng(0), "momentum"))
    tx, shapes = scale_by_celo2(rule), {"kernel": (6, 4)}
    params, first, second = (normal_tree(shapes, seed) for seed in range(3))

    @jit
    def second_update():
        _, state = tx.update(first, tx.init(params), params)
        return tx.update(second, state, params)[0]["kernel"]

    expected = newton_schulz(0.9 * first["kernel"] + second["kernel"])
    expected /= jnp.sqrt(jnp.mean(jnp.square(expected)))
    np.testing.assert_allclose(second_update(), expected, rtol=1e-3, atol=1e-3)
