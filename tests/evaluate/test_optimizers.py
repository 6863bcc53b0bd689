import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import of_kind, small, train

from celo2.evaluate.config import RunConfig, find_variant
from celo2.evaluate.optimizers import (
    OPTIMIZERS,
    load_rule,
    make_optimizer,
    schedule_shape,
    with_norms,
)
from celo2.rule import REFERENCE_WIDTH
from celo2.rulefile import pretrained, save
from lstm_rules import SMALL, random_rule
from rules import jit

PARAMS = {"hidden": {"kernel": jnp.ones((4, 6))}, "head": {"kernel": jnp.ones((6, 3))}}
GRADS = jax.tree.map(lambda x: jnp.linspace(0.5, 1.0, x.size).reshape(x.shape), PARAMS)


@functools.cache
def first_update(config: RunConfig, rate=1e-3):
    tx = make_optimizer(config, load_rule(config.optimizer), lambda count: rate)
    return jit(lambda grads, params: tx.update(grads, tx.init(params), params)[0])(GRADS, PARAMS)


def rms(x) -> float:
    return float(jnp.sqrt(jnp.mean(jnp.square(x))))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_descends(name):
    update = first_update(small(name))
    assert all(jnp.all(u < 0) for u in jax.tree.leaves(update["head"]))
    assert jnp.sum(update["hidden"]["kernel"] * GRADS["hidden"]["kernel"]) < 0


@pytest.mark.parametrize("name", ["adamw", "muon", "celo2"])
def test_every_optimizer_trains_digits(name, tmp_path):
    rate = {"celo2": 3e-3, "muon": 3e-2}.get(name, 1e-2)
    rows = train(tmp_path, small(name, learning_rate=rate, steps=40, evaluate_every=40))
    first, last = of_kind(rows, "valid")
    assert last["metrics"]["loss"] < 0.8 * first["metrics"]["loss"]


def test_celo_gets_the_loss_and_the_number_of_steps(tmp_path):
    file = tmp_path / "celo.safetensors"
    save(random_rule(SMALL["celo"]), file)
    name = f"celo={file}"
    rows = train(tmp_path / "run", small(name, learning_rate=1e-3, steps=4))
    (end,) = of_kind(rows, "end")
    assert end["finished"] and not end["diverged"]
    (start,) = of_kind(rows, "start")
    assert (start["config"]["label"], start["config"]["schedule"]) == ("celo", "constant")
    with pytest.raises(ValueError, match="the rule is for celo, not for velo"):
        load_rule(f"velo={file}")
    with pytest.raises(ValueError, match="or as optimizer celo=FILE in runs"):
        load_rule(str(file))
    with pytest.raises(ValueError, match="needs a rule file for velo, which `celo2 convert` makes"):
        load_rule("velo=absent.safetensors")


def test_rule_s_rms_variant_is_a_fifth():
    whole, fifth = (
        first_update(small(name))["hidden"]["kernel"] for name in ("celo2", "celo2-rms0.2")
    )
    np.testing.assert_allclose(fifth, 0.2 * whole, rtol=1e-5)


def test_scale_of_a_run_reaches_the_rule():
    rms, spectral = (first_update(small("celo2", scale=scale)) for scale in ("rms", "spectral"))
    hidden, head = rms["hidden"]["kernel"], rms["head"]["kernel"]
    factors = np.sqrt(REFERENCE_WIDTH / len(hidden)), REFERENCE_WIDTH / len(head)
    np.testing.assert_allclose(spectral["hidden"]["kernel"], factors[0] * hidden, rtol=1e-5)
    np.testing.assert_allclose(spectral["head"]["kernel"], factors[1] * head, rtol=1e-5)
    with pytest.raises(ValueError, match="scale='norm' is not one of rms, spectral"):
        small("celo2", scale="norm")


def test_celo2_has_muon_s_adam_and_the_paper_s_can_be_chosen():
    def second_update(name):
        config = small(name, adam_multiplier=1.0)
        tx = make_optimizer(config, load_rule(config.optimizer), lambda count: 1e-3)
        # Not compiled: two programs may round differently, and the updates must be the same.
        _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
        return tx.update(jax.tree.map(jnp.negative, GRADS), state, PARAMS)[0]

    ours, plain, muon = map(second_update, ("celo2", "celo2-adam", "muon"))
    np.testing.assert_array_equal(ours["hidden"]["kernel"], plain["hidden"]["kernel"])
    np.testing.assert_allclose(ours["head"]["kernel"], muon["head"]["kernel"], rtol=1e-5)
    assert jnp.all(ours["head"]["kernel"] > plain["head"]["kernel"])  # it turns round sooner


def test_muon_takes_hidden_matrices_and_adamw_the_rest_as_in_celo2():
    update = first_update(small("muon"))
    assert rms(update["hidden"]["kernel"]) < 0.5e-3  # Kimi's 0.2; rank-one gradients have less
    assert rms(update["head"]["kernel"]) > 0.9e-3  # of Adam's first step, all signs


@pytest.mark.parametrize(("name", "usual"), [("celo2", 5.0), ("celo2-rms0.2", 1.0), ("muon", 1.0)])
def test_adam_s_multiplier_can_be_set(name, usual):
    default = first_update(small(name))
    other = first_update(small(name, adam_multiplier=3.0))
    np.testing.assert_array_equal(other["hidden"]["kernel"], default["hidden"]["kernel"])
    ratio = rms(other["head"]["kernel"]) / rms(default["head"]["kernel"])
    assert ratio == pytest.approx(3.0 / usual, rel=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_is_decoupled_and_on_every_parameter(name):
    plain, decayed = (first_update(small(name, weight_decay=d)) for d in (0.0, 0.5))
    variant = find_variant(name)
    factor = variant.adam_multiplier if variant and variant.adam_multiplier else 1.0
    pull = jax.tree.map(lambda a, b: a - b, plain, decayed)
    np.testing.assert_allclose(pull["hidden"]["kernel"], 0.5e-3, rtol=1e-3)
    np.testing.assert_allclose(pull["head"]["kernel"], factor * 0.5e-3, rtol=1e-3)


def test_rule_file_is_an_optimizer(tmp_path):
    path = tmp_path / "own.safetensors"
    save(pretrained("celo2"), path)
    ours = first_update(small(str(path)))
    jax.tree.map(np.testing.assert_array_equal, ours, first_update(small("celo2")))


def test_own_function_is_an_optimizer(tmp_path, monkeypatch):
    (tmp_path / "own_optimizers.py").write_text(
        "import optax\n"
        "def make(schedule, weight_decay):\n"
        "    return optax.chain(optax.add_decayed_weights(weight_decay), optax.sgd(schedule))\n"
        "def wrong(schedule, weight_decay):\n"
        "    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    update = first_update(small("own_optimizers:make", weight_decay=2.0))
    np.testing.assert_allclose(update["head"]["kernel"], -1e-3 * (GRADS["head"]["kernel"] + 2.0))
    with pytest.raises(ValueError, match="returned a int, not an optax"):
        first_update(small("own_optimizers:wrong"))


def test_unknown_optimizer_is_told_what_there_is():
    with pytest.raises(ValueError, match="'adamv' is none of celo2, .*adamw.*no rule file"):
        load_rule("adamv")


def test_clip_bounds_the_global_norm():
    config = small("sgd", clip=0.1, b1=0.0)
    assert float(optax.tree.norm(first_update(config, rate=1.0))) == pytest.approx(0.1)


@pytest.mark.parametrize(("kind", "half"), [("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)])
def test_schedule_rises_linearly_then_falls_to_zero(kind, half):
    shape = schedule_shape(RunConfig("digits-mlp", schedule=kind, warmup=0.2), 100)
    assert [float(shape(count)) for count in (0, 10, 20)] == pytest.approx([0.0, 0.5, 1.0])
    assert float(shape(60)) == pytest.approx(half)
    assert float(shape(100)) == pytest.approx(1.0 if kind == "constant" else 0.0, abs=1e-6)


def test_schedule_without_warmup_starts_at_the_top():
    assert float(schedule_shape(RunConfig("digits-mlp", warmup=0.0), 10)(0)) == 1.0


def test_norms_are_root_mean_squares_by_group():
    tx = with_norms(optax.sgd(0.5))
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    norms = state.norms
    assert float(norms["param_rms"]["hidden"]) == pytest.approx(1.0)
    for group, name in (("hidden", "hidden"), ("other", "head")):
        expected = 0.5 * rms(GRADS[name]["kernel"])
        assert float(norms["update_rms"][group]) == pytest.approx(expected)
