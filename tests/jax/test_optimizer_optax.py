"""The transform within Optax and JAX: wrappers, transformations, odd trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from celo2.jax import Celo2State, celo2, celo2_base, scale_by_celo2
from celo2.routing import MatrixView
from rules import SMALL_BASE, jit, make_rule, normal_tree, train

RULE = make_rule()
SHAPES = {"kernel": (4, 6), "bias": (6,)}
PARAMS = normal_tree(SHAPES, seed=1, scale=0.3)
GRADS = [normal_tree(SHAPES, seed=t, scale=0.1) for t in (2, 3, 4)]
TX = celo2(1e-2, rule=RULE, weight_decay=0.1)


@pytest.fixture(scope="module")
def plain():
    """What TX does by itself: updates, parameters, state."""
    return train(TX, PARAMS, GRADS)


def close(x, y, rtol=2e-5, atol=1e-7):
    """Two trees agree up to the rounding of another compilation."""
    assert jax.tree.structure(x) == jax.tree.structure(y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), x, y)


def dtypes(tree):
    return jax.tree.map(lambda x: x.dtype, tree)


def stacked(trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def test_second_call_does_not_recompile():
    traces = []

    @jit
    def step(params, state, grads):
        traces.append(1)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, TX.init(PARAMS)
    for grads in GRADS:
        params, state = step(params, state, grads)
    assert len(traces) == step._cache_size() == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_scan_equals_a_loop(dtype):
    params, *grads = (jax.tree.map(lambda x: x.astype(dtype), t) for t in (PARAMS, *GRADS))

    def step(carry, grads):
        params, state = carry
        updates, state = TX.update(grads, state, params)
        return (jax.tree.map(jnp.add, params, updates), state), updates

    scan = jit(lambda params, grads: jax.lax.scan(step, (params, TX.init(params)), grads))
    (last, state), updates = scan(params, stacked(grads))
    expected, expected_last, expected_state = train(TX, params, grads)
    assert dtypes(last) == dtypes(params)
    close(state, expected_state, atol=1e-6)
    eps = float(jnp.finfo(dtype).eps)
    updates, expected = (
        jax.tree.map(lambda x: x.astype(jnp.float32), tree) for tree in (updates, stacked(expected))
    )
    close(updates, expected, rtol=4 * eps, atol=1e-5 + 0.05 * eps)


def test_vmap_equals_separate_replicas():
    replicas = [normal_tree(SHAPES, seed=s, scale=0.3) for s in (1, 5)]
    grads = [[normal_tree(SHAPES, seed=s + t) for t in range(2)] for s in (10, 20)]
    state = jax.vmap(TX.init)(stacked(replicas))
    update = jit(jax.vmap(TX.update))
    params = stacked(replicas)
    for t in range(2):
        updates, state = update(stacked([grads[0][t], grads[1][t]]), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    separate = [train(TX, p, g)[1] for p, g in zip(replicas, grads, strict=True)]
    close(params, stacked(separate), atol=1e-6)


def test_donated_state_is_reused(plain):
    @functools.partial(jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        updates, state = TX.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    params = jax.tree.map(jnp.copy, PARAMS)
    state = first = TX.init(params)
    for grads in GRADS:
        params, state = step(params, state, grads)
    close(params, plain[1])
    assert all(x.is_deleted() for x in jax.tree.leaves(first))


@pytest.mark.parametrize("factory", [celo2, celo2_base])
def test_injected_hyperparameters_can_be_changed(factory):
    rule = RULE if factory is celo2 else make_rule(SMALL_BASE)
    tx = optax.inject_hyperparams(factory)(learning_rate=1e-2, rule=rule, rms_scale=0.5)
    state = jit(tx.init)(PARAMS)
    update = jit(tx.update)
    fast, _ = update(GRADS[0], state, PARAMS)
    state.hyperparams["learning_rate"] = jnp.float32(1e-3)
    slow, _ = update(GRADS[0], state, PARAMS)
    assert jnp.sqrt(jnp.mean(fast["kernel"] ** 2)) == pytest.approx(5e-3, rel=1e-4)
    close(slow, jax.tree.map(lambda x: 0.1 * x, fast))
    assert update._cache_size() == 1


def test_injected_schedule_is_followed():
    schedule = optax.linear_schedule(1e-2, 0.0, 2)
    injected = optax.inject_hyperparams(celo2)(learning_rate=schedule, rule=RULE)
    close(train(injected, PARAMS, GRADS)[0], train(celo2(schedule, rule=RULE), PARAMS, GRADS)[0])


def test_multi_steps_averages_gradients():
    mean = jax.tree.map(lambda x, y: (x + y) / 2, *GRADS[:2])
    (skipped, update), _, _ = train(optax.MultiSteps(TX, 2), PARAMS, GRADS[:2])
    (expected,), _, _ = train(TX, PARAMS, [mean])
    assert not any(x.any() for x in jax.tree.leaves(skipped))
    close(update, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("partition", [optax.partition, optax.multi_transform])
def test_partition_gives_the_rule_its_part(partition):
    tx = partition(
        {"rule": scale_by_celo2(RULE), "sgd": optax.sgd(1.0)}, {"kernel": "rule", "bias": "sgd"}
    )
    (update,), _, _ = train(tx, PARAMS, GRADS[:1])
    (expected,), _, _ = train(scale_by_celo2(RULE), {"kernel": PARAMS["kernel"]}, [kernel_only()])
    close(update, expected | {"bias": -GRADS[0]["bias"]})


def kernel_only():
    return {"kernel": GRADS[0]["kernel"]}


def test_masked_leaves_the_others_alone():
    tx = optax.masked(celo2(1e-2, rule=RULE), {"kernel": True, "bias": False})
    (update,), _, _ = train(tx, PARAMS, GRADS[:1])
    assert jnp.array_equal(update["bias"], GRADS[0]["bias"])
    assert jnp.sqrt(jnp.mean(update["kernel"] ** 2)) == pytest.approx(1e-2, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overrides": {"kernel": MatrixView((), (1,), (0,))}},
        {"adam_mask": {"kernel": False, "bias": True}},
        {"weight_decay_mask": {"kernel": True, "bias": False}},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_map_params_reaches_all_that_belongs_to_parameters(options):
    tx = celo2(1e-2, rule=RULE, **options)
    state = jit(tx.init)(PARAMS)
    raised = optax.tree.map_params(tx, lambda x: x + 1, state)
    momentum = optax.tree.get(raised, "momentum")
    assert all((x == 1).all() for x in jax.tree.leaves(momentum))
    assert optax.tree.get_all_with_path(raised, "count")
    for path, count in optax.tree.get_all_with_path(raised, "count"):
        assert count == 0, path


def test_apply_if_finite_passes_good_steps_and_drops_bad_ones(plain):
    tx = optax.apply_if_finite(TX, max_consecutive_errors=2)
    bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), GRADS[0])
    updates, params, state = train(tx, PARAMS, [GRADS[0], bad, *GRADS[1:]])
    close(params, plain[1])
    assert not any(x.any() for x in jax.tree.leaves(updates[1]))
    assert state.total_notfinite == 1


def test_chain_clips_before_the_rule():
    large = [jax.tree.map(lambda x: 100 * x, g) for g in GRADS]
    tx = optax.chain(optax.clip_by_global_norm(1.0), TX)
    clipped = [optax.projections.projection_l2_ball(g, 1.0) for g in large]
    close(train(tx, PARAMS, large)[1], train(TX, PARAMS, clipped)[1], atol=1e-5)


def test_unknown_extra_arguments_are_tolerated(plain):
    updates, _ = jit(TX.update)(GRADS[0], TX.init(PARAMS), PARAMS, value=1.0, loss_fn_name=None)
    close(updates, plain[0][0])


@pytest.mark.parametrize("tx", [TX, scale_by_celo2(RULE)], ids=["celo2", "scale_by_celo2"])
def test_missing_parameters_are_asked_for(tx):
    with pytest.raises(ValueError, match=r"call tx.update\(grads, state, params\)"):
        tx.update(GRADS[0], tx.init(PARAMS))


def test_state_is_a_named_tuple_of_trees_like_the_parameters():
    state = scale_by_celo2(RULE).init(PARAMS)
    assert isinstance(state, Celo2State) and state.count.dtype == jnp.int32
    for tree in (*state.momentum, *state[2:]):
        assert jax.tree.structure(tree) == jax.tree.structure(PARAMS)
    assert jax.tree.map(jnp.shape, state.rms) == SHAPES


@pytest.mark.parametrize("factory", [celo2, scale_by_celo2], ids=lambda f: f.__name__)
@pytest.mark.parametrize("tree", [{}, (), {"a": None}, {"a": optax.MaskedNode()}], ids=str)
def test_tree_without_leaves_is_returned_as_it_is(factory, tree):
    tx = celo2(1e-2, rule=RULE) if factory is celo2 else scale_by_celo2(RULE)
    updates, _ = tx.update(tree, tx.init(tree), tree)
    assert updates == tree


def test_absent_leaves_and_odd_shapes_are_updated_beside_others():
    params = {
        "kernel": PARAMS["kernel"],
        "none": None,
        "masked": optax.MaskedNode(),
        "scalar": jnp.ones(()),
        "empty": jnp.zeros((0, 3)),
        "empty_vector": jnp.zeros((0,)),
        "list": [jnp.ones((1, 6)), (jnp.ones((6, 1)),)],
    }
    for tx in (celo2(1e-2, rule=RULE), scale_by_celo2(RULE)):
        updates, state = train(tx, params, [params])[0::2]
        assert jax.tree.structure(updates[0]) == jax.tree.structure(params)
        assert jax.tree.map(jnp.shape, updates[0]) == jax.tree.map(jnp.shape, params)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, state)))
