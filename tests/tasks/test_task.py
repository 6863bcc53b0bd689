import jax
import numpy as np
import optax
import pytest

from celo2.tasks import TASKS, supervised


@pytest.fixture(scope="module")
def digits():
    return TASKS["digits-mlp"].make(batch=32)


@pytest.fixture(scope="module")
def trainer(digits):
    return supervised(digits, optax.adamw(1e-3), evaluation_batches=3)


def test_same_keys_give_the_same_run(trainer):
    runs = []
    for _ in range(2):
        state, metrics = trainer.step(trainer.init(jax.random.key(0)), jax.random.key(1))
        runs.append((state.params, metrics, trainer.evaluate(state, jax.random.key(2))))
    jax.tree.map(np.testing.assert_array_equal, *runs)


def test_sampling_works_under_jit_vmap_and_scan(digits):
    @jax.jit
    def losses(data, params, keys):  # [problems, steps]
        def unroll(keys):
            def step(total, key):
                return total, digits.loss(params, digits.sample(data, key, "train"))[0]

            return jax.lax.scan(step, 0.0, keys)[1]

        return jax.vmap(unroll)(keys)

    keys = jax.random.split(jax.random.key(0), (3, 5))
    values = losses(digits.data, digits.init(jax.random.key(1)), keys)
    assert values.shape == (3, 5) and len(np.unique(values)) == 15


def test_step_does_not_carry_the_data_as_a_constant(digits):
    trainer = supervised(digits, optax.sgd(1.0))
    step, state = trainer.step, jax.eval_shape(trainer.init, jax.random.key(0))
    lowered = step.func.lower(*step.args, state, jax.random.key(0)).as_text()
    assert len(lowered) < 2 * digits.data["train"][0].nbytes


def test_evaluation_averages_its_batches(digits, trainer):
    @jax.jit
    def loss(params, key):
        return digits.loss(params, digits.sample(digits.data, key, "valid"))[0]

    state, key = trainer.init(jax.random.key(0)), jax.random.key(1)
    expected = np.mean([float(loss(state.params, k)) for k in jax.random.split(key, 3)])
    assert float(trainer.evaluate(state, key)["loss"]) == pytest.approx(expected, rel=1e-5)
