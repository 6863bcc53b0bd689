"""What holds for any shape, scale and dtype; half precision; the size of the state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celo2.jax import celo2, scale_by_celo2
from celo2.rule import CELO2
from rules import SMALL, SMALL_BASE, jit, make_rule, normal_tree, state_bytes, train

RULE = make_rule()
SHAPES = {"kernel": (4, 6), "stack": (3, 4, 6)}
PARAMS = normal_tree(SHAPES, seed=1, scale=0.3)
GRADS = [normal_tree(SHAPES, seed=t, scale=0.1) for t in (2, 3)]
TX = scale_by_celo2(RULE)
INIT, UPDATE = jit(TX.init), jit(TX.update)

# One tree of all shapes and dtypes, so that one program serves every example.
DTYPES = {"float32": 2e-3, "bfloat16": 2e-2, "float16": 2e-3}
MIXED = {
    f"{dtype}{list(shape)}": jax.ShapeDtypeStruct(shape, dtype)
    for dtype in DTYPES
    for shape in [(4, 6), (1, 5), (5, 1), (2, 4, 6), (7,), ()]
}


@pytest.fixture(scope="module")
def update_and_state():
    """For each of two rules its update function and the state of the mixed tree."""
    rules = [scale_by_celo2(make_rule(config)) for config in (SMALL, SMALL_BASE)]
    zeros = jax.tree.map(jnp.zeros_like, MIXED)
    return [(jit(tx.update), jit(tx.init)(zeros)) for tx in rules]


def mixed_tree(rng, scale):
    """Normal arrays in all shapes and dtypes, cut where they would overflow."""
    limits = {name: float(jnp.finfo(x.dtype).max) for name, x in MIXED.items()}
    return {
        name: jnp.asarray(np.clip(scale * rng.normal(size=x.shape), -limit, limit), x.dtype)
        for (name, x), limit in zip(MIXED.items(), limits.values(), strict=True)
    }


def slice_rms(x):
    axes = tuple(range(max(0, x.ndim - 2), x.ndim))
    return np.sqrt(np.square(np.asarray(x, np.float64)).mean(axis=axes))


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@given(st.floats(-30, 30), st.integers(0, 2**32 - 1), st.integers(0, 1))
def test_any_gradient_gives_a_finite_update_of_unit_rms(update_and_state, exponent, seed, which):
    rng = np.random.default_rng(seed)
    params = mixed_tree(rng, 1.0)
    update, state = update_and_state[which]
    for _ in range(2):
        old, grads = state, mixed_tree(rng, 10.0**exponent)
        steps, state = update(grads, old, params)
        assert types(state) == types(old) and types(steps) == types(params)
        for x in jax.tree.leaves((steps, state)):
            assert np.isfinite(np.asarray(x, np.float64)).all()
        for name, step in steps.items():
            moved = np.reshape(state.moves[name] > 0, slice_rms(step).shape)
            assert moved.all() or step.dtype == jnp.float16, name  # where 1e-30 is zero
            np.testing.assert_allclose(slice_rms(step), moved, rtol=DTYPES[step.dtype.name])


@given(st.lists(st.integers(0, 4), max_size=5), st.booleans(), st.sampled_from(["f4", "bfloat16"]))
def test_any_shape_keeps_its_shape_and_the_state_its_types(shape, published, momentum_dtype):
    tx = scale_by_celo2(RULE, published=published, momentum_dtype=momentum_dtype)
    params = {"x": jax.ShapeDtypeStruct(tuple(shape), jnp.bfloat16)}
    state = jax.eval_shape(tx.init, params)
    updates, new_state = jax.eval_shape(tx.update, params, state, params)
    assert updates == params
    assert new_state == state
    assert state.momentum[0]["x"].dtype == jnp.dtype(momentum_dtype)
    assert state.rms["x"].dtype == jnp.float32


@given(st.permutations(range(4)), st.permutations(range(6)))
def test_permuted_rows_and_columns_permute_the_update(rows, columns):
    def turned(tree):
        return {name: x[..., np.array(rows), :][..., np.array(columns)] for name, x in tree.items()}

    state, turned_state = INIT(PARAMS), INIT(turned(PARAMS))
    for grads in GRADS:
        update, state = UPDATE(grads, state, PARAMS)
        turned_update, turned_state = UPDATE(turned(grads), turned_state, turned(PARAMS))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), turned_update, turned(update)
    )


def test_stack_of_matrices_equals_its_slices():
    slices = [{f"s{i}": tree["stack"][i] for i in range(3)} for tree in (PARAMS, *GRADS)]
    stacks = [{"stack": tree["stack"]} for tree in (PARAMS, *GRADS)]
    whole, _, _ = train(TX, stacks[0], stacks[1:])
    parts, _, _ = train(TX, slices[0], slices[1:])
    for stack, separate in zip(whole, parts, strict=True):
        np.testing.assert_allclose(
            stack["stack"], np.stack([separate[f"s{i}"] for i in range(3)]), atol=1e-5
        )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_parameters_keep_float32_statistics(dtype):
    params, *grads = (jax.tree.map(lambda x: x.astype(dtype), t) for t in (PARAMS, *GRADS))
    exact = [jax.tree.map(lambda x: x.astype(jnp.float32), t) for t in (params, *grads)]
    state, exact_state = INIT(params), INIT(exact[0])
    for grad, exact_grad in zip(grads, exact[1:], strict=True):
        update, state = UPDATE(grad, state, params)
        exact_update, exact_state = UPDATE(exact_grad, exact_state, exact[0])
    assert {x.dtype for x in update.values()} == {jnp.dtype(dtype)}
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), state, exact_state
    )
    for name in SHAPES:
        np.testing.assert_array_equal(update[name], exact_update[name].astype(dtype))


@pytest.mark.parametrize("option", ["momentum_dtype", "newton_schulz_dtype"])
def test_bfloat16_option_stays_close(option):
    params = {"kernel": PARAMS["kernel"]}
    grads = [{"kernel": tree["kernel"]} for tree in GRADS]
    exact, _, _ = train(scale_by_celo2(RULE), params, grads)
    rough, _, _ = train(scale_by_celo2(RULE, **{option: jnp.bfloat16}), params, grads)
    assert 0 < np.sqrt(np.mean((rough[1]["kernel"] - exact[1]["kernel"]) ** 2)) < 0.05
    assert rough[1]["kernel"].dtype == jnp.float32


# The language model that benchmarks/step_time.py measures.
LM = {f"block_{i}/{name}": (384, 384) for i in range(6) for name in "qkvo"}
LM |= {f"block_{i}/up": (384, 1536) for i in range(6)}
LM |= {f"block_{i}/down": (1536, 384) for i in range(6)}
LM |= {f"block_{i}/norm": (384,) for i in range(6)} | {"embed": (8192, 384)}


@pytest.mark.parametrize(("momentum_dtype", "most"), [(None, 16.1), (jnp.bfloat16, 10.1)])
def test_state_has_few_bytes_per_parameter(momentum_dtype, most):
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in LM.items()}
    size = sum(x.size for x in params.values())
    rule = make_rule(CELO2)
    assert state_bytes(scale_by_celo2(rule, momentum_dtype=momentum_dtype), params) <= most * size
    assert state_bytes(celo2(1e-3, rule=rule, momentum_dtype=momentum_dtype), params) <= most * size


def test_update_needs_no_implicit_promotion(strict_dtypes):
    params = {name: jnp.asarray(x, jnp.bfloat16) for name, x in PARAMS.items()}
    for norm in ("norm", "rolling_norm_clip"):
        tx = scale_by_celo2(make_rule(dataclasses.replace(SMALL, norm=norm, form="d_exp_m_avg")))
        jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)
