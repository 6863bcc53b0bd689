"""celo2 as the optimizer of flax and equinox models, and its state in checkpoints."""

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from celo2.jax import celo2, explain
from celo2.routing import MatrixView
from rules import jit, make_rule, normal_tree, train

RULE = make_rule()
TX = celo2(1e-2, rule=RULE)
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2, name="head")(linen.relu(linen.Dense(6, name="hidden")(x)))


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 6, rngs=rngs)
        self.head = nnx.Linear(6, 2, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))  # no parameter

    def __call__(self, x):
        return self.head(nnx.relu(self.hidden(x)))


class EqxMlp(eqx.Module):
    hidden: eqx.nn.Linear
    head: eqx.nn.Linear
    activation: callable = eqx.field(static=True)

    def __init__(self, key):
        self.hidden, self.head = (
            eqx.nn.Linear(*sizes, key=k)
            for sizes, k in zip(((4, 6), (6, 2)), jax.random.split(key), strict=True)
        )
        self.activation = jax.nn.relu

    def __call__(self, x):
        return self.head(self.activation(self.hidden(x)))


def loss_of(outputs):
    return jnp.mean((outputs - 1.0) ** 2)


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


def test_train_state_applies_our_updates():
    model = Mlp()
    params = jit(model.init)(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=TX)
    grads = jit(jax.grad(lambda p: loss_of(model.apply({"params": p}, X))))(params)
    new = jit(lambda state, grads: state.apply_gradients(grads=grads))(state, grads)
    (update,), expected, _ = train(TX, params, [grads])
    assert new.step == 1
    assert rms(update["hidden"]["kernel"]) == pytest.approx(1e-2, rel=1e-4)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), new.params, expected)


def test_nnx_optimizer_applies_our_updates():
    model = NnxMlp(nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda model: loss_of(model(X)))(model)
        optimizer.update(model, grads)
        return nnx.to_pure_dict(grads)

    grads = step(model, optimizer)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    (update,), _, _ = train(TX, before, [grads])
    moved = jax.tree.map(jnp.subtract, after, before)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), moved, update)
    assert rms(moved["hidden"]["kernel"]) == pytest.approx(1e-2, rel=1e-4)
    step(model, optimizer)


def test_equinox_model_is_updated_through_a_filter():
    model = EqxMlp(jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    overrides = {"weight": MatrixView((), (1,), (0,))}  # equinox stores (out, in)
    tx = celo2(1e-2, rule=RULE, overrides=overrides)
    shown = {line.path: line.viewed for line in explain(params, rule=RULE, overrides=overrides)}
    assert shown["hidden/weight"] == (4, 6)

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(lambda model: loss_of(jax.vmap(model)(X)))(model)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    state = tx.init(params)
    for _ in range(2):
        old, (model, state) = model, step(model, state)
        assert rms(model.hidden.weight - old.hidden.weight) == pytest.approx(1e-2, rel=1e-3)
    assert model.activation is jax.nn.relu


def test_mask_may_be_an_equinox_module():
    params = eqx.filter(EqxMlp(jax.random.key(0)), eqx.is_inexact_array)
    mask = jax.tree.map(lambda x: x.ndim < 2, params)
    assert callable(mask)
    table = explain(params, rule=RULE, adam_mask=mask)
    assert [line.updater for line in table] == ["rule", "adam"] * 2
    celo2(1e-2, rule=RULE, adam_mask=mask, weight_decay=0.1, weight_decay_mask=mask).init(params)


SHAPES = {"kernel": (4, 6), "bias": (6,)}
PARAMS = normal_tree(SHAPES, seed=1)
GRADS = [normal_tree(SHAPES, seed=t) for t in (2, 3, 4)]


def continues_equally(restore):
    """Whether a run whose state went through `restore` ends as one whose state did not."""
    _, params, state = train(TX, PARAMS, GRADS[:2])
    _, expected, _ = train(TX, params, GRADS[2:], state)
    restored = restore(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert jax.tree.map(jnp.shape, restored) == jax.tree.map(jnp.shape, state)
    _, found, _ = train(TX, params, GRADS[2:], restored)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_state_survives_flax_serialization():
    fresh = TX.init(PARAMS)
    continues_equally(
        lambda state: flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(state))
    )


def test_state_survives_an_orbax_checkpoint(tmp_path):
    def restore(state):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            return checkpointer.restore(tmp_path / "state", jax.eval_shape(TX.init, PARAMS))

    continues_equally(restore)
