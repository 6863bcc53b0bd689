"""`celo2` and `celo2_base`: who gets which update, at which rate and with which decay."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from celo2.jax import celo2, celo2_base, explain, optimizer, scale_by_celo2
from celo2.routing import MatrixView
from celo2.rule import ADAM_MULTIPLIER, REFERENCE_WIDTH
from rules import SMALL, SMALL_BASE, make_rule, normal_tree, train

RULE = make_rule()
SHAPES = {"hidden": (4, 6), "mlp": (4, 6), "bias": (6,), "embed": (4, 6), "lm_head": (4, 6)}
MATRICES = {"hidden", "mlp"}
PARAMS = normal_tree(SHAPES, seed=1, scale=0.3)
GRADS = [normal_tree(SHAPES, seed=t, scale=0.1) for t in (2, 3, 4)]


def close(x, y):
    """Whether two trees agree up to the rounding of another compilation."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-8), x, y)


PLAIN_ADAM = {"adam_learning_rate": 3e-3, "adam_nesterov": False}  # its first step is ±3e-3


def split(tree):
    """The matrices and the rest."""
    return (
        {k: v for k, v in tree.items() if k in MATRICES},
        {k: v for k, v in tree.items() if k not in MATRICES},
    )


@pytest.mark.parametrize("nesterov", [False, True])
def test_celo2_is_the_rule_on_matrices_and_adamw_on_the_rest(nesterov):
    tx = celo2(1e-3, rule=RULE, weight_decay=0.1, adam_learning_rate=3e-3, adam_nesterov=nesterov)
    updates, _, _ = train(tx, PARAMS, GRADS)

    matrices, rest = split(PARAMS)
    by_rule = optax.chain(
        scale_by_celo2(RULE), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(1e-3)
    )
    by_adam = optax.adamw(3e-3, 0.9, 0.95, 1e-8, weight_decay=0.1, nesterov=nesterov)
    expected_matrices, _, _ = train(by_rule, matrices, [split(g)[0] for g in GRADS])
    expected_rest, _, _ = train(by_adam, rest, [split(g)[1] for g in GRADS])
    for update, by_rule, by_adam in zip(updates, expected_matrices, expected_rest, strict=True):
        close(update, by_rule | by_adam)


def test_step_of_a_matrix_has_the_learning_rate_as_rms():
    (update,), _, _ = train(celo2(3e-4, rule=RULE), PARAMS, GRADS[:1])
    for name in MATRICES:
        assert np.sqrt(np.mean(update[name] ** 2)) == pytest.approx(3e-4, rel=1e-5)


def test_base_takes_every_tensor_but_single_elements():
    rule = make_rule(SMALL_BASE)
    params = PARAMS | {"temperature": jnp.ones(()), "gain": jnp.ones((1, 1))}
    grads = GRADS[0] | {"temperature": jnp.ones(()), "gain": jnp.ones((1, 1))}
    (update,), _, _ = train(celo2_base(1e-3, rule=rule, adam_nesterov=False), params, [grads])
    (expected,), _, _ = train(scale_by_celo2(rule), PARAMS, GRADS[:1])
    close({k: update[k] for k in PARAMS}, jax.tree.map(lambda u: -1e-3 * u, expected))
    for name in ("temperature", "gain"):
        assert float(update[name].item()) == pytest.approx(-1e-3 * ADAM_MULTIPLIER)


@pytest.mark.parametrize("rate", [1e-3, optax.linear_schedule(1e-3, 0.0, 2)])
def test_adam_learns_faster_by_its_multiplier(rate):
    def faster(count):
        return ADAM_MULTIPLIER * (rate(count) if callable(rate) else rate)

    make = partial(celo2, rate, rule=RULE, adam_nesterov=False)
    ours, _, _ = train(make(), PARAMS, GRADS)
    given, _, _ = train(make(adam_learning_rate=faster), PARAMS, GRADS)
    for x, y in zip(ours, given, strict=True):
        close(x, y)
    assert np.abs(ours[0]["bias"]).max() == pytest.approx(1e-3 * ADAM_MULTIPLIER, rel=1e-3)


def test_schedule_scales_each_step():
    schedule = optax.piecewise_constant_schedule(1e-3, {1: 0.5, 2: 0.0})
    directions, _, _ = train(scale_by_celo2(RULE), {"hidden": PARAMS["hidden"]}, hidden_only())
    params = {"hidden": PARAMS["hidden"]}
    tx, state = celo2(schedule, rule=RULE), None
    for t, rate in enumerate((1e-3, 5e-4, 0.0)):
        # The parameters as `train` moved them for the directions.
        (update,), _, state = train(tx, params, hidden_only()[t : t + 1], state)
        close(update["hidden"], -rate * directions[t]["hidden"])
        params = {"hidden": params["hidden"] + directions[t]["hidden"]}


def hidden_only():
    return [{"hidden": grad["hidden"]} for grad in GRADS]


@pytest.mark.parametrize(
    "mask",
    [
        {name: name in ("hidden", "bias") for name in SHAPES},
        lambda params: {name: name in ("hidden", "bias") for name in SHAPES},
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: path[0].key in ("hidden", "bias"), params
        ),
    ],
    ids=["tree", "function", "function of the leaves"],
)
def test_weight_decay_follows_its_mask_and_each_branch_s_rate(mask):
    tx = celo2(1e-3, rule=RULE, weight_decay=0.1, weight_decay_mask=mask)
    (decayed,), _, _ = train(tx, PARAMS, GRADS[:1])
    (plain,), _, _ = train(celo2(1e-3, rule=RULE), PARAMS, GRADS[:1])
    rates = {"hidden": 1e-3, "bias": 1e-3 * ADAM_MULTIPLIER}
    for name in SHAPES:
        expected = -rates.get(name, 0.0) * 0.1 * PARAMS[name]
        np.testing.assert_allclose(decayed[name] - plain[name], expected, atol=1e-8)


def test_weight_decay_mask_may_be_a_prefix_of_the_tree():
    params = {"a": normal_tree({"w": (4, 6), "b": (6,)}), "c": normal_tree({"w": (4, 6)}, 1)}
    tx = celo2(1e-3, rule=RULE, weight_decay=0.1, weight_decay_mask={"a": True, "c": False})
    plain = celo2(1e-3, rule=RULE)
    (decayed,), _, _ = train(tx, params, [params])
    (update,), _, _ = train(plain, params, [params])
    difference = jax.tree.map(lambda x, y: x - y, decayed, update)
    np.testing.assert_allclose(difference["a"]["w"], -1e-4 * params["a"]["w"], atol=1e-8)
    np.testing.assert_allclose(
        difference["a"]["b"], -1e-4 * ADAM_MULTIPLIER * params["a"]["b"], atol=1e-8
    )
    np.testing.assert_allclose(difference["c"]["w"], 0, atol=1e-8)


def test_rms_scale_multiplies_the_rule_alone():
    (full,), _, _ = train(celo2(1e-3, rule=RULE), PARAMS, GRADS[:1])
    (fifth,), _, _ = train(celo2(1e-3, rule=RULE, rms_scale=0.2), PARAMS, GRADS[:1])
    close(fifth, {k: 0.2 * v if k in MATRICES else v for k, v in full.items()})


def test_spectral_scale_gives_orthogonal_updates_the_singular_values_that_it_promises():
    shapes = {"a": (128, 128), "wide": (32, 96), "tall": (96, 32), "conv": (2, 3, 8, 16)}
    shapes |= {"experts": (2, 16, 64), "bias": (9,)}
    params, grads = normal_tree(shapes, seed=1), normal_tree(shapes, seed=2)
    make = partial(celo2, 1.0, rule=RULE, rms_scale=0.5)
    (rms,), _, state = train(make(), params, [grads])
    (spectral,), _, other = train(make(scale="spectral"), params, [grads])
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for name in ("a", "bias"):
        np.testing.assert_array_equal(spectral[name], rms[name])
    for name, shape in {"wide": (32, 96), "tall": (96, 32), "conv": (48, 16)}.items():
        # Newton–Schulz leaves singular values near 1, not at it: their mean square counts.
        values = np.linalg.svd(spectral[name].reshape(shape), compute_uv=False)
        wanted = 0.5 * np.sqrt(REFERENCE_WIDTH * max(1, shape[1] / shape[0]))
        assert np.sqrt(np.mean(values**2)) == pytest.approx(wanted, rel=1e-4), name
    close(spectral["experts"], np.sqrt(REFERENCE_WIDTH / 16) * rms["experts"])
    with pytest.raises(ValueError, match="scale='norm' is not one of rms, spectral"):
        make(scale="norm")


def test_spectral_scale_divides_the_updates_of_heads_by_their_inputs():
    shapes = {"hidden": (8, 32), "head": (32, 5), "embed": (5, 8), "bias": (8,)}
    params, grads = normal_tree(shapes, seed=1), normal_tree(shapes, seed=2)
    # Decay counts as it does with "rms".
    make = partial(celo2, 1.0, rule=RULE, weight_decay=0.1)
    (rms,), (spectral,) = (train(make(scale=s), params, [grads])[0] for s in ("rms", "spectral"))
    decay = -0.1 * ADAM_MULTIPLIER * params["head"]
    factor = REFERENCE_WIDTH / 32
    close(spectral["head"] - decay, factor * (rms["head"] - decay))
    for name in ("embed", "bias"):
        np.testing.assert_array_equal(spectral[name], rms[name])
    # Asked for by hand, AdamW updates a matrix as it is.
    (masked,), *_ = train(make(scale="spectral", adam_mask=True), params, [grads])
    close(masked["head"], rms["head"])


@pytest.mark.parametrize("as_function", [True, False])
def test_adam_mask_decides_alone(as_function):
    mask = {name: name == "hidden" for name in SHAPES}
    mask_or_function = (lambda _: mask) if as_function else mask
    tx = celo2(1e-3, rule=RULE, adam_mask=mask_or_function, **PLAIN_ADAM)
    (update,), _, _ = train(tx, PARAMS, GRADS[:1])
    np.testing.assert_allclose(np.abs(update["hidden"]), 3e-3, rtol=1e-3)
    for name in ("mlp", "bias", "embed", "lm_head"):
        assert np.sqrt(np.mean(update[name] ** 2)) == pytest.approx(1e-3, rel=1e-5), name


def test_adam_mask_of_another_tree_is_refused():
    with pytest.raises(ValueError, match="adam_mask does not fit the parameters"):
        celo2(1e-3, rule=RULE, adam_mask={"other": True}).init(PARAMS)


@pytest.mark.parametrize("option", ["momentum_dtype", "newton_schulz_dtype"])
@pytest.mark.parametrize("dtype", ["int8", "half-way"])
def test_precision_that_is_not_floating_point_is_refused(option, dtype):
    with pytest.raises(ValueError, match=f"{option}={dtype!r} must be a floating-point dtype"):
        celo2(1e-3, rule=RULE, **{option: dtype})


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": None},
        {"learning_rate": "1e-3"},
        {"weight_decay": "0.1"},
        {"rms_scale": None},
        {"adam_learning_rate": "1e-3"},
    ],
    ids=str,
)
def test_setting_that_is_no_number_is_refused(settings):
    (name, value), *_ = settings.items()
    with pytest.raises(TypeError, match=f"{name}={value!r} must be a number or a schedule"):
        celo2(**{"learning_rate": 1e-3, "rule": RULE} | settings)


def test_overrides_choose_updater_and_view():
    view = MatrixView((), (1,), (0,))
    overrides = {"^hidden": "adam", "embed": "rule", "mlp": view}
    tx = celo2(1e-3, rule=RULE, overrides=overrides, **PLAIN_ADAM)
    (update,), _, _ = train(tx, PARAMS, GRADS[:1])
    np.testing.assert_allclose(np.abs(update["hidden"]), 3e-3, rtol=1e-3)
    turned = {name: {"mlp": tree["mlp"].T} for name, tree in (("p", PARAMS), ("g", GRADS[0]))}
    (expected,), _, _ = train(scale_by_celo2(RULE), turned["p"], [turned["g"]])
    close(update["mlp"], -1e-3 * expected["mlp"].T)
    assert np.sqrt(np.mean(update["embed"] ** 2)) == pytest.approx(1e-3, rel=1e-5)


def test_update_uses_the_view_that_explain_shows():
    shapes = {"kernel": (2, 4, 6)}
    params, grads = normal_tree(shapes), normal_tree(shapes, 1)
    overrides = {"k": "rule", "kernel": MatrixView((), (0, 1), (2,))}  # the first one counts
    (line,) = explain(params, rule=RULE, overrides=overrides)
    (update,), _, _ = train(celo2(1e-3, rule=RULE, overrides=overrides), params, [grads])
    assert line.viewed == (2, 4, 6)
    rms = np.sqrt(np.mean(update["kernel"] ** 2, axis=(1, 2)))
    np.testing.assert_allclose(rms, 1e-3, rtol=1e-5)  # each slice a matrix of its own


def test_options_reach_the_rule():
    config = dataclasses.replace(SMALL, norm="raw")
    tx = celo2(1.0, rule=make_rule(config), published=True, momentum_dtype=jnp.bfloat16)
    params = {"kernel": jnp.ones((4, 6))}
    (update,), _, state = train(tx, params, [{"kernel": jnp.zeros((4, 6))}])
    assert update["kernel"].any()  # the published rule moves without a gradient
    momentum = optax.tree.get(state, "momentum")
    assert jax.tree.leaves(momentum)[0].dtype == jnp.bfloat16


def test_override_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="override 'qkv' matches no parameter; the paths are bias"):
        celo2(1e-3, rule=RULE, overrides={"qkv": "adam"}).init(PARAMS)


@pytest.mark.parametrize("factory", [celo2, celo2_base, scale_by_celo2], ids=lambda f: f.__name__)
def test_init_takes_shapes(factory):
    tx = scale_by_celo2(RULE) if factory is scale_by_celo2 else factory(1e-3, rule=RULE)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float16), PARAMS)
    zeros = jax.tree.map(jnp.zeros_like, shapes)
    state, expected = tx.init(shapes), tx.init(zeros)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    lone = jax.ShapeDtypeStruct((2, 4, 8), jnp.float32)  # as optax's own tests have it
    assert jax.tree.leaves(tx.init(lone))


@pytest.mark.parametrize("shape", [(65536, 65536), (2**32,), (2, 65536, 65536)], ids=str)
def test_tensor_of_2_32_elements_can_be_traced(shape):
    params = {"kernel": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    for tx in (celo2(1e-3, rule=RULE), scale_by_celo2(make_rule(SMALL_BASE))):
        state = jax.eval_shape(tx.init, params)
        updates, new_state = jax.eval_shape(tx.update, params, state, params)
        assert updates == params and new_state == state


def test_routes_are_found_once_per_call(monkeypatch):
    calls = []
    find = optimizer.route
    monkeypatch.setattr(optimizer, "route", lambda *args: calls.append(args[0]) or find(*args))
    tx = celo2(1e-3, rule=RULE)
    state = jax.eval_shape(tx.init, PARAMS)
    assert sorted(calls) == sorted(SHAPES)
    calls.clear()
    jax.eval_shape(tx.update, GRADS[0], state, PARAMS)
    assert sorted(calls) == sorted(SHAPES)
