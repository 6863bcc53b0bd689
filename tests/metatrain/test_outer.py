import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quadratics import RULE, WEIGHTS, quadratic, tiny_config

from celo2.metatrain import outer
from celo2.rule import make_odd
from celo2.runs.processes import make_mesh

SMOOTH = dataclasses.replace(RULE, orthogonalize=False)


@functools.cache
def program_of(scales, weights, changes):
    """Families that differ in the scale of their loss, compiled once for all tests."""
    config = tiny_config(rule=SMOOTH, problems=8, **dict(changes))
    families = []
    for scale, weight in zip(scales, weights, strict=True):
        family = quadratic(config, noise=0.5)
        loss = family.loss
        families.append(
            family._replace(
                loss=lambda p, b, s=scale, loss=loss: s * loss(p, b), weight=weight, classes=10**9
            )
        )
    return outer.build(config, families, make_mesh())


def first_step(scales=(1.0,), weights=(1.0,), steps=1, **changes):
    """The state after some iterations, and their metrics."""
    program = program_of(scales, weights, tuple(changes.items()))
    return program.run(program.init(WEIGHTS), steps)


# One program for three tests; the outer AdamW makes steps of its rate whatever the gradient's norm.
CLIPPED = {"clip": 1e-9, "averaging": 0.9, "learning_rate": 1.0, "odd": True}


def test_every_family_has_its_loss_and_its_time():
    _, metrics = first_step(scales=(1.0, 3.0), weights=(1.0, 1.0))
    assert metrics.family_loss.shape == (1, 2)
    assert metrics.family_loss[0, 1] > 2 * metrics.family_loss[0, 0]
    np.testing.assert_allclose(metrics.loss, metrics.family_loss.mean(1), rtol=1e-5)
    assert (metrics.seconds > 0).all()
    assert metrics.inner_steps.tolist() == [2 * 2 * 8 * 2]


def test_balance_brings_losses_of_any_scale_to_one():
    norms = [first_step(scales=(s,), balance="deviation")[1].gradient_norm for s in (1.0, 50.0)]
    np.testing.assert_allclose(*norms, rtol=0.1)  # small gradients meet absolute constants
    plain = [first_step(scales=(s,))[1].gradient_norm for s in (1.0, 50.0)]
    assert plain[1] > 20 * plain[0]


def test_weight_scales_a_family_s_gradient():
    norms = [first_step(weights=(w,))[1].gradient_norm for w in (1.0, 4.0)]
    np.testing.assert_allclose(4 * norms[0], norms[1], rtol=1e-4)


def test_clip_bounds_the_outer_gradient():
    state, metrics = first_step(**CLIPPED)
    assert metrics.gradient_norm > 1e-9  # as it was before
    moments = [x for x in jax.tree.leaves(state.outer) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert max(float(jnp.abs(x).max()) for x in moments) <= 1e-10


@pytest.mark.parametrize("changes", [{}, CLIPPED], ids=["newest", "average"])
def test_average_trails_the_weights_only_if_asked(changes):
    state, _ = first_step(steps=3, **changes)
    same = np.array_equal(state.average["w0"], state.weights["w0"])
    assert same == (not changes)
    assert not np.array_equal(state.average["w0"], WEIGHTS["w0"])


def test_agreement_is_the_cosine_between_halves_of_the_problems():
    _, metrics = first_step(steps=3)
    assert (np.abs(metrics.agreement) <= 1).all() and metrics.agreement.any()


def test_odd_rules_stay_odd():
    state, _ = first_step(steps=3, **CLIPPED)
    for name, w in make_odd(SMOOTH, state.weights).items():
        np.testing.assert_allclose(w, state.weights[name], rtol=1e-5)
        assert not np.array_equal(w, make_odd(SMOOTH, WEIGHTS)[name])  # and learn
