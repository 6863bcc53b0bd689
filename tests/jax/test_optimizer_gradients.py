"""Bad and missing gradients, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from celo2.jax import Skipped, celo2, scale_by_celo2, skipped
from celo2.rule import RuleConfig
from rules import jit, make_rule, normal_tree, train

RULE = make_rule()
SHAPES = {"kernel": (4, 6), "stack": (3, 4, 6), "other": (4, 6)}
PARAMS = normal_tree(SHAPES, seed=1, scale=0.3)
GRADS = [normal_tree(SHAPES, seed=t, scale=0.1) for t in (2, 3)]
TX = scale_by_celo2(RULE)
INIT, UPDATE = jit(TX.init), jit(TX.update)
INIT, UPDATE = jit(TX.init), jit(TX.update)
both = pytest.mark.parametrize("tx", [TX, celo2(1e-2, rule=RULE)], ids=["scale_by_celo2", "celo2"])


@pytest.fixture(scope="module")
def started():
    """The state after one ordinary step."""
    return UPDATE(GRADS[0], INIT(PARAMS), PARAMS)[1]


def statistics(state, name):
    """All that is remembered of one tensor but its counts, an array for each decay."""
    whole = [tree[name] for tree in (*state.momentum, state.rms, state.running_rms)]
    return [np.asarray(x) for x in (*whole, *state.rows[name], *state.cols[name])]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_gradient_leaves_its_matrix_alone_and_is_counted(started, bad):
    grads = GRADS[1] | {"kernel": GRADS[1]["kernel"].at[2, 3].set(bad)}
    update, state = UPDATE(grads, started, PARAMS)
    good_update, good_state = UPDATE(GRADS[1], started, PARAMS)

    assert not update["kernel"].any()
    jax.tree.map(
        np.testing.assert_array_equal, statistics(state, "kernel"), statistics(started, "kernel")
    )
    assert state.skipped["kernel"] == 1 and state.moves["kernel"] == 1
    for name in ("stack", "other"):
        np.testing.assert_array_equal(update[name], good_update[name])
        assert not state.skipped[name].any() and (state.moves[name] == 2).all()
    # Afterwards it goes on as if the step had not been.
    later, _ = UPDATE(GRADS[1], state, PARAMS)
    np.testing.assert_array_equal(later["kernel"], good_update["kernel"])


def test_nonfinite_gradient_leaves_only_its_slice_of_a_stack_alone(started):
    grads = GRADS[1] | {"stack": GRADS[1]["stack"].at[1, 0, 0].set(np.nan)}
    update, state = UPDATE(grads, started, PARAMS)
    good_update, _ = UPDATE(GRADS[1], started, PARAMS)
    assert not update["stack"][1].any()
    np.testing.assert_array_equal(update["stack"][::2], good_update["stack"][::2])
    for new, old in zip(statistics(state, "stack"), statistics(started, "stack"), strict=True):
        np.testing.assert_array_equal(new[1], old[1])
    assert list(state.skipped["stack"].ravel()) == [0, 1, 0]
    assert list(state.moves["stack"].ravel()) == [2, 1, 2]


@pytest.mark.parametrize("nesterov", [False, True])
def test_nonfinite_gradient_counts_as_zero_for_adam(nesterov):
    tx = celo2(1e-2, rule=make_rule(), adam_nesterov=nesterov)
    params = normal_tree({"kernel": (4, 6), "bias": (6,)}, seed=1)
    grads = [normal_tree({"kernel": (4, 6), "bias": (6,)}, seed=t) for t in (2, 3, 4)]
    bad = grads[1] | {"bias": grads[1]["bias"].at[:3].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf]))}
    zero = grads[1] | {"bias": grads[1]["bias"].at[:3].set(0.0)}
    ours, theirs = (train(tx, params, [grads[0], g, grads[2]])[1] for g in (bad, zero))
    np.testing.assert_array_equal(ours["bias"], theirs["bias"])
    assert np.isfinite(ours["bias"]).all()
    with_them = train(celo2(1e-2, rule=make_rule(), skip_nonfinite=False), params, [bad])[1]
    assert np.isnan(with_them["bias"][0])


def test_skipped_steps_can_be_read_from_the_state_of_celo2():
    tx = celo2(1e-2, rule=RULE)
    params, bad = {"kernel": PARAMS["kernel"]}, {"kernel": jnp.full((4, 6), np.nan)}
    _, last, state = train(tx, params, [bad, bad])
    assert optax.tree.get(state, "skipped")["kernel"] == 2
    np.testing.assert_array_equal(last["kernel"], params["kernel"])


def test_tensor_holds_still_until_its_first_gradient():
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    late = GRADS[0] | {"kernel": zero["kernel"], "stack": GRADS[0]["stack"].at[1].set(0)}
    state = INIT(PARAMS)
    update, state = UPDATE(late, state, PARAMS)
    assert not update["kernel"].any() and not update["stack"][1].any()
    assert update["other"].any() and update["stack"][0].any() and update["stack"][2].any()
    assert state.moves["kernel"] == 0 and list(state.moves["stack"].ravel()) == [1, 0, 1]

    update, state = UPDATE(GRADS[1], state, PARAMS)
    assert update["kernel"].any() and update["stack"][1].any()
    update, _ = UPDATE(zero, state, PARAMS)  # its momentum goes on
    assert all((np.abs(x).max(axis=(-2, -1)) > 0).all() for x in update.values())


def test_smallest_gradient_counts_as_one():
    tiny = jax.tree.map(lambda x: jnp.full_like(x, 1e-37), PARAMS)
    update, _ = UPDATE(tiny, INIT(PARAMS), PARAMS)
    assert all(x.any() and np.isfinite(x).all() for x in update.values())


def test_both_policies_can_be_switched_to_the_published_behaviour():
    params = {"kernel": PARAMS["kernel"]}
    zero = {"kernel": jnp.zeros((4, 6))}
    infinite = {"kernel": GRADS[0]["kernel"].at[0, 0].set(np.inf)}
    clipped = {"kernel": GRADS[0]["kernel"].at[0, 0].set(1000)}

    drifting = scale_by_celo2(RULE, hold_unused=False)
    assert train(drifting, params, [zero])[0][0]["kernel"].any()
    taking = scale_by_celo2(RULE, skip_nonfinite=False)
    (update,), _, state = train(taking, params, [infinite])
    np.testing.assert_array_equal(
        update["kernel"], train(taking, params, [clipped])[0][0]["kernel"]
    )
    assert state.skipped["kernel"] == 0

    published = scale_by_celo2(RULE, published=True)
    assert train(published, params, [zero])[0][0]["kernel"].any()
    assert train(published, params, [infinite])[0][0]["kernel"].any()


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_, jnp.uint8])
@both
def test_parameters_that_are_not_real_numbers_are_refused(tx, dtype):
    params = {"kernel": PARAMS["kernel"], "step": jnp.zeros((2, 3), dtype)}
    with pytest.raises(TypeError, match=f"step is {jnp.dtype(dtype)}; leave it out with optax"):
        tx.init(params)


@pytest.mark.parametrize("leaf", [1.0, "kernel"])
def test_leaf_that_is_no_array_is_refused(leaf):
    with pytest.raises(TypeError, match=f"a/b is a {type(leaf).__name__}"):
        TX.init({"a": {"b": leaf}})


def refused(match, grads, state=None, params=PARAMS, tx=TX):
    with pytest.raises((ValueError, TypeError), match=match):
        tx.update(grads, jax.eval_shape(tx.init, params) if state is None else state, params)


@both
def test_gradients_of_another_tree_are_refused(tx):
    refused(
        "gradients and parameters are .* .3 and 2 leaves; only one has kernel",
        PARAMS,
        params=without_kernel(),
        tx=tx,
    )


def without_kernel():
    return {name: x for name, x in PARAMS.items() if name != "kernel"}


@both
def test_gradient_of_another_shape_is_refused(tx):
    grads = PARAMS | {"other": jnp.ones((6, 4))}
    refused(r"other has shape \(6, 4\) in the gradients and \(4, 6\) in", grads, tx=tx)


def test_gradient_of_another_shape_is_refused_of_adam_s_share():
    grads = {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(1)}  # it would be broadcast
    tx, params = celo2(1e-2, rule=RULE), {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}
    refused(r"bias has shape \(1,\) in the gradients", grads, params=params, tx=tx)


@both
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_gradient_that_is_not_of_real_numbers_is_refused(tx, dtype):
    grads = PARAMS | {"other": jnp.ones((4, 6), dtype)}
    refused(f"other is {np.dtype(dtype)} in the gradients, not a real", grads, tx=tx)


def test_state_of_another_model_is_refused():
    refused(
        "optimizer state and parameters are .*only one has kernel",
        PARAMS,
        TX.init(without_kernel()),
    )
    other = PARAMS | {"other": jnp.ones((6, 4))}
    refused(r"other has shape \(6, 4\) in the optimizer state", PARAMS, TX.init(other))


def test_state_of_another_rule_is_refused():
    config = RuleConfig((3,), momentum_decays=(0.9, 0.99), factored_decays=(0.9, 0.99))
    state = scale_by_celo2(make_rule(config)).init(PARAMS)
    refused("state has 2 momenta and the rule 1: it was made with another rule", PARAMS, state)


def test_state_of_another_view_is_refused():
    params = {"conv": jnp.ones((3, 3, 4, 8))}
    state = scale_by_celo2(RULE, published=True).init(params)
    refused(r"tensor seen as \(36, 8\): it was made with other views", params, state, params)


def test_count_does_not_overflow(started):
    last = np.int32(2**31 - 1)
    full = started._replace(
        count=last, moves=jax.tree.map(lambda x: jnp.full_like(x, last), started.moves)
    )
    update, state = UPDATE(GRADS[1], full, PARAMS)
    assert state.count == last and (state.moves["stack"] == last).all()
    assert all(x.any() for x in update.values())


ADAM_SHAPES = {"kernel": (4, 6), "bias": (6,)}


def train_adam(dtype, sizes, **options):
    """All that AdamW's share goes through while its gradients are of these sizes."""
    tx = celo2(1e-2, rule=RULE, **options)
    params = normal_tree(ADAM_SHAPES, seed=1, dtype=dtype)
    signs = jnp.array([1, -1, 1, -1, 1, 1], dtype)
    grads = [
        normal_tree(ADAM_SHAPES, seed=2, dtype=dtype) | {"bias": signs * jnp.asarray(size, dtype)}
        for size in sizes
    ]
    updates, last, state = train(tx, params, grads)
    return params, updates, last, state


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (jnp.float32, (1e19, 1e30, 3e38, 1.0)),
        (jnp.bfloat16, (1e19, 1e38, 1.0)),
        (jnp.float16, (6e4, 6e-8, 1.0)),
        (jnp.float16, (6e-8, 6e-8, 6e-8)),
    ],
)
def test_adam_takes_any_finite_gradient(dtype, sizes, nesterov):
    params, updates, last, state = train_adam(dtype, sizes, adam_nesterov=nesterov)
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(state))
    for update in updates:
        step = np.abs(np.asarray(update["bias"], np.float64))
        assert (step > 0).all() and (step < 0.3).all()
    assert updates[0]["bias"].dtype == last["bias"].dtype == dtype
    assert np.isfinite(np.asarray(last["bias"], np.float64)).all()
    assert skipped(state) == (0, 0)


def test_largest_float64_gradient_is_not_taken_for_infinite():
    with jax.enable_x64(True):
        params = {"kernel": jnp.linspace(-1, 1, 24, dtype=jnp.float64).reshape(4, 6)}
        grads = [{"kernel": jnp.full((4, 6), size)} for size in (1e200, jnp.inf)]
        updates, _, state = train(celo2(1e-2, rule=RULE), params, grads)
        first, second = (np.asarray(update["kernel"]) for update in updates)
        assert np.isfinite(first).all() and (first != 0).all()
        assert not second.any() and skipped(state) == (1, 0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_adam_keeps_float32_statistics(dtype):
    _, _, _, state = train_adam(dtype, (0.1, 0.2))
    for name in ("mu", "nu"):
        assert optax.tree.get(state, name)["bias"].dtype == jnp.float32


def test_adam_leaves_ordinary_gradients_as_they_are():
    params, grads = (normal_tree({"bias": (6,)}, seed) for seed in (1, 2))
    ours = train(celo2(1e-2, rule=RULE, adam_learning_rate=8e-2), params, [grads, grads])[1]
    theirs = train(optax.nadamw(8e-2, b2=0.95, weight_decay=0.0), params, [grads, grads])[1]
    np.testing.assert_array_equal(ours["bias"], theirs["bias"])


def test_both_branches_count_gradients_that_are_not_finite():
    shapes = {"kernel": (4, 6), "stack": (3, 4, 6), "bias": (6,), "scale": (6,)}
    params, good = normal_tree(shapes, 1), normal_tree(shapes, 2)
    bad = good | {
        "stack": good["stack"].at[1, 0, 0].set(np.nan),
        "bias": good["bias"].at[0].set(np.inf),
        "scale": jnp.full(6, np.nan),
    }
    tx = optax.chain(optax.clip(1e30), celo2(1e-2, rule=RULE))
    _, _, state = train(tx, params, [bad, good, bad])
    assert jax.jit(skipped)(state) == skipped(state) == Skipped(rule=2, adam=2)
    assert optax.tree.get(state, "nonfinite")["scale"] == 2
    published = celo2(1e-2, rule=RULE, published=True)
    assert skipped(train(published, params, [bad])[2]) == (0, 0)


def test_skipped_counts_what_reaches_scale_by_celo2_too(started):
    bad = {name: x.at[..., 0, 0].set(np.nan) for name, x in GRADS[1].items()}
    assert skipped(UPDATE(bad, started, PARAMS)[1]) == (5, 0)  # a stack has three matrices


def test_skipped_of_another_optimizer_is_refused():
    with pytest.raises(ValueError, match="needs the state of celo2, celo2_base or scale_by_celo2"):
        skipped(optax.adam(1e-3).init(PARAMS))
