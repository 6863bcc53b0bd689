import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import celo2.jax
from celo2.rule import CELO2, Rule, initial_weights
from celo2.rulefile import save
from celo2.velo import CELO, VeloConfig
from conftest import golden_folder, run_python
from lstm_reference import Reference
from lstm_rules import SMALL, golden_rule, random_rule

MAKE = {"velo": celo2.jax.velo, "celo": celo2.jax.celo}
SHAPES = {"bias": (4,), "kernel": (4, 6)}
VELO_CASES = {  # steps and config
    "noisy": (20, VeloConfig("velo", 32, 16)),
    "long": (1000, VeloConfig("velo", 32, 16)),
    "bugged_loss": (20, VeloConfig("velo", 32, 16, loss_horizon=10)),
    "ff_mult1": (20, VeloConfig("velo", 32, 16, bank_scale=1.0)),
}
CELO_CASES = {"celo": (20, CELO), "celo_long": (1000, CELO), "celo_phase1": (20, CELO)}


class Golden:
    """A file of golden vectors."""

    def __init__(self, name: str):
        with np.load(golden_folder(name) / f"{name}.npz") as arrays:
            self.arrays = dict(arrays)
        self.leaves = sorted(k[7:] for k in self.arrays if k.startswith("params/"))
        self.losses = self.arrays["losses"]
        self.shapes = {leaf: self.at("params", 0)[leaf].shape for leaf in self.leaves}

    def at(self, name: str, step: int) -> dict[str, np.ndarray]:
        return {leaf: self.arrays[f"{name}/{leaf}"][step] for leaf in self.leaves}


golden = functools.cache(Golden)


def draw(step: int, shapes=SHAPES, seed: int = 0):
    """Parameters, gradients and a loss."""
    rng = np.random.default_rng((seed, step))
    params = {k: rng.normal(0, 0.3, s).astype(np.float32) for k, s in shapes.items()}
    scale = 10.0 ** rng.integers(-4, 2)
    grads = {k: (scale * rng.normal(0, 1, s)).astype(np.float32) for k, s in shapes.items()}
    return params, grads, np.float32(2.0 / (1 + step) + 0.3 * rng.normal())


def on_device(tree):
    return jax.tree.map(jnp.asarray, tree)


def step_of(tx):
    return jax.jit(lambda grads, state, params, loss: tx.update(grads, state, params, value=loss))


def relative_error(update, expected) -> float:
    rms = np.sqrt(np.mean(np.square(expected)))
    return float(np.max(np.abs(np.asarray(update, np.float64) - expected)) / rms)


@pytest.mark.parametrize("case", [*VELO_CASES, *CELO_CASES])
def test_reference_gives_the_published_updates(case):
    steps, config = (VELO_CASES | CELO_CASES)[case]
    file = golden("velo" if case in VELO_CASES else "celo")
    rule = golden_rule(config, file.arrays, "noisy" if case in VELO_CASES else "celo")
    reference = Reference(config, rule.weights, file.shapes, steps, scheduled=case != "celo_phase1")
    for t, loss in enumerate(file.losses):
        updates = reference.update(file.at("grads", t), file.at("params", t), loss)
        expected = file.at(f"{case}/updates_f64", t)
        assert max(relative_error(updates[k], expected[k]) for k in file.leaves) < 1e-9


# The slow ones differ from the others in a constant each, and compile for as long.
@pytest.mark.parametrize(
    "case",
    [
        *("noisy", "ff_mult1", "celo"),
        *(pytest.param(c, marks=pytest.mark.slow) for c in ("long", "bugged_loss", "celo_long")),
    ],
)
def test_updates_are_the_published_ones(case, strict_dtypes):
    steps, config = (VELO_CASES | CELO_CASES)[case]
    file = golden("velo" if case in VELO_CASES else "celo")
    rule = golden_rule(config, file.arrays, "noisy" if case in VELO_CASES else "celo")
    tx = MAKE[config.optimizer](steps, rule=rule)
    step, state = step_of(tx), tx.init(on_device(file.at("params", 0)))
    # The published float32 code is 5e-3 away from its float64 in the long case, this 4e-4.
    tolerance = {"bugged_loss": 1e-4, "celo": 1e-4, "celo_long": 2e-4}.get(case, 1e-3)
    for t, loss in enumerate(file.losses):
        grads, params = on_device((file.at("grads", t), file.at("params", t)))
        updates, state = step(grads, state, params, loss)
        expected = file.at(f"{case}/updates_f64", t)
        errors = {k: relative_error(updates[k], expected[k]) for k in file.leaves}
        assert max(errors.values()) < tolerance, (t, errors)
    check_state(file, case, state)


def check_state(file, case, state):
    arrays = {k[len(case) + 7 :]: v for k, v in file.arrays.items() if k.startswith(f"{case}/stat")}
    # The published float32 means, and so the LSTM, have errors of their own in long runs.
    close = functools.partial(
        np.testing.assert_allclose, rtol=1e-4, atol=2e-3 if "long" in case else 1e-4
    )
    rows = len(state.hidden)
    close(state.hidden, arrays["lstm_hidden"][:rows])
    close(state.cell, arrays["lstm_cell"][:rows])
    close(state.loss_means, arrays["loss_buffer/means"])
    close(state.loss_minima, arrays["loss_buffer/running_min"], rtol=1e-3)
    assert state.count == len(file.losses)
    if "m/vec7" not in arrays:
        return
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=0)
    for leaf, shape in file.shapes.items():
        for i, momentum in enumerate(state.momentum):
            close(momentum[leaf], arrays[f"m/{leaf}"][..., i], atol=1e-6)
        close(state.rms[leaf], arrays[f"rms/{leaf}"][..., 0])
        names = ("v_row", "v_col") if len(shape) > 1 else ("v_diag",)
        for name, mine in zip(names, (state.rows[leaf], state.cols[leaf]), strict=False):
            theirs = np.moveaxis(arrays[f"{name}/{leaf}"], -1, 0)
            close(np.reshape(mine, theirs.shape), theirs)


@pytest.mark.parametrize("optimizer", MAKE)
def test_updates_are_the_reference_s_with_random_weights(optimizer):
    rule = random_rule(SMALL[optimizer])
    shapes = SHAPES | {"scale": (), "stack": (2, 3, 5), "wide": (1, 9), "kernel_2": (4, 6)}
    tx = MAKE[optimizer](6, rule=rule)
    step, state = step_of(tx), tx.init(on_device(draw(0, shapes)[0]))
    reference = Reference(rule.config, rule.weights, shapes, 6)
    for t in range(8):  # beyond the planned end, too
        params, grads, loss = draw(t, shapes)
        updates, state = step(on_device(grads), state, on_device(params), loss)
        expected = reference.update(grads, params, loss)
        assert max(relative_error(updates[k], expected[k]) for k in shapes) < 1e-3


@functools.cache
def tunable_step(optimizer):
    """A compiled step whose learning rate and weight decay are arguments."""
    rule = random_rule(SMALL[optimizer])

    def step(grads, state, params, loss, rate, decay):
        tx = MAKE[optimizer](6, rule=rule, learning_rate=rate, weight_decay=decay)
        return tx.update(grads, state, params, value=loss)

    return MAKE[optimizer](6, rule=rule).init, jax.jit(step)


@pytest.mark.parametrize("optimizer", MAKE)
def test_weight_decay_goes_into_gradient_and_loss(optimizer):
    init, step = tunable_step(optimizer)
    states = [init(on_device(draw(0)[0]))] * 2
    for t in range(4):
        params, grads, loss = on_device(draw(t))
        by_hand = jax.tree.map(lambda g, p: g + 0.01 * p, grads, params)
        squares = sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
        expected, states[0] = step(by_hand, states[0], params, loss + 0.01 * squares, 1e-3, 0.0)
        updates, states[1] = step(grads, states[1], params, loss, 1e-3, 0.01)
        for name, update in updates.items():
            np.testing.assert_allclose(update, expected[name], rtol=2e-3, atol=1e-9)


@pytest.mark.parametrize("optimizer", MAKE)
def test_learning_rate_scales_the_published_step(optimizer):
    init, step = tunable_step(optimizer)
    params, grads, loss = on_device(draw(0))
    published, faster = (step(grads, init(params), params, loss, r, 0.0)[0] for r in (1e-3, 4e-3))
    default = MAKE[optimizer](6, rule=random_rule(SMALL[optimizer]))
    found, _ = step_of(default)(grads, default.init(params), params, loss)
    for name, update in found.items():
        np.testing.assert_allclose(update, published[name], rtol=1e-5)
        np.testing.assert_allclose(faster[name], 4 * published[name], rtol=1e-5)


def test_learning_rate_may_be_a_schedule():
    rule = random_rule(SMALL["celo"])
    tx = celo2.jax.celo(6, rule=rule, learning_rate=lambda count: 1e-3 * (1 + count))
    init, fixed = tunable_step("celo")
    params, grads, loss = on_device(draw(0))
    states, step = [tx.init(params), init(params)], step_of(tx)
    for t in range(2):
        found, states[0] = step(grads, states[0], params, loss)
        expected, states[1] = fixed(grads, states[1], params, loss, 1e-3 * (1 + t), 0.0)
        np.testing.assert_allclose(found["kernel"], expected["kernel"], rtol=1e-5)


def test_scan_and_vmap_give_what_single_steps_give():
    tx = celo2.jax.velo(6, rule=random_rule(SMALL["velo"]))
    params, grads, loss = on_device(draw(0))
    factors = jnp.asarray([1.0, 0.5, 0.25])

    def start(scale):
        scaled = jax.tree.map(lambda p: scale * p, params)
        return scaled, tx.init(scaled)

    def step(carry, factor, update=tx.update):
        params, state = carry
        scaled = jax.tree.map(lambda g: factor * g, grads)
        updates, state = update(scaled, state, params, value=factor * loss)
        return (optax.apply_updates(params, updates), state), None

    scanned = jax.jit(jax.vmap(lambda scale: jax.lax.scan(step, start(scale), factors)[0]))
    side_by_side = scanned(jnp.asarray([1.0, 2.0]))
    _, tunable = tunable_step("velo")
    single = start(2.0)
    for factor in factors:
        single, _ = step(
            single, factor, lambda g, s, p, *, value: tunable(g, s, p, value, 1e-3, 0.0)
        )
    assert single[1].count == 3
    for a, b in zip(*map(jax.tree.leaves, (single, side_by_side)), strict=True):
        np.testing.assert_allclose(a, b[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", MAKE)
def test_state_is_float32_and_updates_have_the_dtype_of_gradients(optimizer):
    init, step = tunable_step(optimizer)
    params, grads, loss = on_device(draw(0))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, grads))
    state = init(half[0])
    updates, after = step(half[1], state, half[0], loss, 1e-3, 0.0)
    assert {x.dtype.name for x in jax.tree.leaves(updates)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(after)} == {"float32", "int32"}
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    whole = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    exact, _ = step(whole[1], state, whole[0], loss, 1e-3, 0.0)
    np.testing.assert_allclose(updates["kernel"].astype(jnp.float32), exact["kernel"], rtol=1e-2)


def test_celo_treats_parts_of_a_tree_as_the_whole():
    tx = celo2.jax.celo(6, rule=random_rule(SMALL["celo"]))
    params, grads, loss = on_device(draw(0))
    masked = optax.masked(tx, {name: name == "kernel" for name in params})
    init, whole_step = tunable_step("celo")
    whole, _ = whole_step(grads, init(params), params, loss, 1e-3, 0.0)
    part, _ = step_of(masked)(grads, masked.init(params), params, loss)
    np.testing.assert_allclose(part["kernel"], whole["kernel"], rtol=1e-5)
    assert init(params).hidden.shape == (1, 8)


def test_velo_sees_all_tensors_together():
    tx = celo2.jax.velo(6, rule=random_rule(SMALL["velo"]))
    init, whole_step = tunable_step("velo")
    params, grads, loss = on_device(draw(0))
    whole, _ = whole_step(grads, init(params), params, loss, 1e-3, 0.0)
    del params["bias"], grads["bias"]
    part, _ = step_of(tx)(grads, tx.init(params), params, loss)
    assert relative_error(part["kernel"], np.asarray(whole["kernel"])) > 1e-3


@pytest.mark.parametrize("optimizer", MAKE)
def test_state_has_trees_of_the_parameters(optimizer):
    tx = MAKE[optimizer](5, rule=random_rule(SMALL[optimizer]))
    chain = optax.chain(optax.clip_by_global_norm(1.0), tx)
    state = chain.init(on_device(draw(0)[0]))
    frozen = optax.tree.map_params(chain, lambda x: None, state)
    assert jax.tree.leaves(frozen[1].rms) == []
    assert frozen[1].hidden is not None


def test_missing_arguments_are_named():
    tx = celo2.jax.velo(5, rule=random_rule(SMALL["velo"]))
    params, grads, loss = on_device(draw(0))
    state = tx.init(params)
    with pytest.raises(ValueError, match="velo needs the loss of this step as `value`"):
        tx.update(grads, state, params)
    with pytest.raises(ValueError, match="velo needs the current parameters"):
        tx.update(grads, state, value=loss)
    with pytest.raises(ValueError, match=r"value has shape \(3,\)"):
        tx.update(grads, state, params, value=jnp.ones(3))
    with pytest.raises(ValueError, match="gradients and parameters are different trees"):
        tx.update({"kernel": grads["kernel"]}, state, params, value=loss)
    with pytest.raises(ValueError, match=r"empty has shape \(0, 3\), no element"):
        tx.init({"empty": jnp.zeros((0, 3))})
    for wrong in (0, 2.5, True):
        with pytest.raises(ValueError, match="must be the planned number of updates"):
            celo2.jax.velo(wrong, rule=random_rule(SMALL["velo"]))


def test_rule_of_another_optimizer_is_refused(tmp_path):
    files = {name: tmp_path / f"{name}.safetensors" for name in ("velo", "celo", "celo2")}
    for name, config in SMALL.items():
        save(random_rule(config), files[name])
    save(Rule(CELO2, initial_weights(CELO2, np.random.default_rng(0))), files["celo2"])
    make = {name: functools.partial(MAKE[name], 5) for name in MAKE}
    make["celo2"] = functools.partial(celo2.jax.celo2, 1e-3)
    for name, optimizer in make.items():
        optimizer(rule=files[name])
        for other in files.keys() - {name}:
            with pytest.raises(ValueError, match=f"the rule is for {other}, not for {name}: use"):
                optimizer(rule=files[other])


def test_update_on_a_mesh_is_that_of_one_device():
    code = """
import jax, jax.numpy as jnp, numpy as np, sys
sys.path.insert(0, "tests")
from jax.sharding import NamedSharding, PartitionSpec as P
import celo2.jax
from lstm_rules import SMALL, random_rule
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
params = {"a": jnp.asarray(rng.normal(size=(8, 12)), jnp.float32), "b": jnp.ones(8)}
place = {"a": NamedSharding(mesh, P("data", None)), "b": NamedSharding(mesh, P())}
both = [getattr(celo2.jax, name)(5, rule=random_rule(SMALL[name])) for name in SMALL]
def step(params):
    return [tx.update(params, tx.init(params), params, value=1.0) for tx in both]
single = jax.jit(step)(params)
with jax.set_mesh(mesh):
    spread = jax.jit(step)(jax.device_put(params, place))
for a, b in zip(jax.tree.leaves(single), jax.tree.leaves(spread), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-9)
print("same")
"""
    assert run_python(code, devices=4).split() == ["same"]
