import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quadratics import RULE, WEIGHTS, quadratic

import celo2
from celo2 import cli
from celo2.baselines import muon
from celo2.metatrain import heldout
from celo2.rule import ADAM_MULTIPLIER, Rule
from celo2.tasks import Task
from celo2.tasks.images import digits_convnet
from celo2.tasks.networks import init_patch_convnet, patch_convolution
from rules import jit, make_rule

GOOD = Rule(RULE, WEIGHTS)


def quadratic_task(offset: float = 0.0) -> Task:
    family = quadratic(noise=0.1)

    def loss(params, target):
        value = family.loss(params, target) + offset
        return value, {"loss": value}

    return Task(
        family.init, lambda data, key, split: family.sample(data, key, 0), loss, family.data
    )


def make_problem(offset: float = 0.0) -> heldout.HeldOut:
    return heldout.HeldOut("tiny", quadratic_task(offset), steps=3, seeds=2, worst=3.0)


@pytest.fixture(scope="module")
def problem():
    return make_problem()


def test_trying_another_rule_does_not_compile_again(problem):
    first = heldout.tune(problem, GOOD)
    second = heldout.tune(problem, make_rule(RULE, seed=1))
    assert first["losses"] != second["losses"]
    assert heldout._program(problem, RULE, ADAM_MULTIPLIER)._cache_size() == 1


def test_the_same_rule_gets_the_same_result(problem):
    assert heldout.tune(problem, GOOD) == heldout.tune(problem, GOOD)


def test_adam_s_rate_beside_a_rule_can_be_set(problem):
    usual = heldout.tune(problem, GOOD)
    assert heldout.tune(problem, GOOD, ADAM_MULTIPLIER) == usual
    assert heldout.tune(problem, GOOD, 2 * ADAM_MULTIPLIER)["losses"] != usual["losses"]


def test_best_rate_is_that_of_the_lowest_loss(problem):
    result = heldout.tune(problem, GOOD)
    assert len(result["rates"]) == len(result["losses"]) == heldout.RATES
    assert len(set(result["losses"])) == heldout.RATES
    best = result["losses"].index(min(result["losses"]))
    assert (result["loss"], result["rate"]) == (min(result["losses"]), result["rates"][best])


def test_losses_are_those_of_training_with_the_optimizer_users_call(problem):
    result, task = heldout.tune(problem, "adamw"), problem.task
    rate, losses = result["rates"][2], []
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 1, problem.steps)
    tx = optax.adamw(schedule, 0.9, 0.95, weight_decay=0.0)
    for key in jax.random.split(jax.random.key(heldout.SEED), problem.seeds):
        params = task.init(key)
        state = tx.init(params)
        for step_key in jax.random.split(key, problem.steps):
            batch = task.sample(task.data, step_key, "train")
            grads, _ = jax.grad(task.loss, has_aux=True)(params, batch)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        keys = jax.random.split(jax.random.key(heldout.VALID_SEED), heldout.VALID_BATCHES)
        batches = [task.sample(task.data, k, "valid") for k in keys]
        losses.append(np.mean([task.loss(params, batch)[0] for batch in batches]))
    assert result["losses"][2] == pytest.approx(np.mean(losses), rel=1e-4)
    assert 0 < result["error"] < result["loss"]


def test_every_optimizer_has_as_many_rates_over_as_wide_a_range():
    ranges = [heldout.rates_of(kind) for kind in (*heldout.BASELINES, RULE)]
    assert {len(rates) for rates in ranges} == {heldout.RATES}
    for rates in ranges:
        assert rates == sorted(rates)
        assert rates[-1] / rates[0] == pytest.approx(20, rel=0.01)


def test_score_is_the_mean_log_ratio_to_adamw(problem):
    other = make_problem(offset=1.0)
    found = heldout.try_rule(GOOD, {"one": problem, "two": other})
    logs = [math.log(r["loss"] / r["adamw"]) for r in found["problems"].values()]
    assert [r["score"] for r in found["problems"].values()] == pytest.approx(logs)
    assert found["score"] == pytest.approx(np.mean(logs))
    assert found["problems"]["two"]["adamw"] == heldout.tune(other, "adamw")["loss"]
    assert heldout.compare(problem, heldout.tune(problem, "adamw"))["score"] == 0
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize("offset", [math.nan, math.inf, 1e9])
def test_diverged_run_counts_as_the_worst_loss(offset):
    result = heldout.tune(make_problem(offset), "adamw")
    assert result["losses"] == [3.0] * heldout.RATES


def test_muon_takes_what_the_rule_takes():
    params = init_patch_convnet(jax.random.key(0))
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params)
    tx = muon(lambda count: 1.0)
    updates = jit(lambda p, g: tx.update(g, tx.init(p), p)[0])(params, grads)
    folded = updates["conv_1"]["kernel"].reshape(-1, 32)
    singular = np.linalg.svd(folded, compute_uv=False)
    assert singular.max() / singular.min() < 3
    # Adam's first step is the gradient's sign, up to its Nesterov momentum.
    head = np.abs(updates["head"]["kernel"])
    assert head.max() == pytest.approx(head.min(), rel=1e-3)


def test_problems_are_made_once_and_known_by_name():
    quick = heldout.problems(["mlp", "convnet"], size="quick")
    assert list(quick) == ["mlp", "convnet"]
    assert quick["mlp"] is heldout.problems(["mlp"], size="quick")["mlp"]
    assert quick["mlp"].steps < heldout.problems(["mlp"])["mlp"].steps
    with pytest.raises(ValueError, match="'mpl' is not a held-out problem; there are mlp, wide"):
        heldout.problems(["mpl"])
    with pytest.raises(ValueError, match="names is empty: name some of mlp"):
        heldout.problems([])
    with pytest.raises(ValueError, match="size='huge' is not one of quick, full"):
        heldout.problems(size="huge")


@pytest.mark.parametrize("side", [4, 5, 8])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_by_patches_is_the_convolution(side, stride):
    x = jax.random.normal(jax.random.key(0), (2, side, side, 3))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, 4))
    expected = jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(patch_convolution(kernel, x, stride), expected, atol=1e-4)


def test_digits_convnet_has_four_axis_kernels_and_learns_from_its_gradient():
    task = digits_convnet(batch=16)
    params = task.init(jax.random.key(0))
    assert params["conv_1"]["kernel"].shape == (3, 3, 16, 32)
    batch = task.sample(task.data, jax.random.key(1), "train")
    (before, _), grads = jit(jax.value_and_grad(task.loss, has_aux=True))(params, batch)
    after = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
    assert task.loss(after, batch)[0] < before


@pytest.fixture
def tiny_try(problem, monkeypatch, tmp_path):
    """The path of a rule file, with one tiny problem in place of the real ones."""
    monkeypatch.setattr(heldout, "problems", lambda names, size: {"tiny": problem})
    for name, rule in (("a", GOOD), ("b", dataclasses.replace(GOOD, weights=_negative(WEIGHTS)))):
        celo2.save(rule, tmp_path / f"{name}.safetensors")
    monkeypatch.chdir(tmp_path)


def _negative(weights):
    return {name: -jnp.asarray(w) for name, w in weights.items()}


def test_try_prints_a_row_per_problem_and_a_column_per_optimizer(tiny_try, problem, capsys):
    pytest.importorskip("tyro")
    assert cli.main(["try", "a.safetensors", "--against", "adamw,b.safetensors"]) == 0
    head, row, score = capsys.readouterr().out.splitlines()
    assert head.split() == ["problem", "a.safetensors", "adamw", "b.safetensors"]
    ours = heldout.tune(problem, GOOD)
    assert row.split()[:4] == ["tiny", f"{ours['loss']:.4f}", "at", f"{ours['rate']:g}"]
    assert score.split()[2] == "+0.000"


def test_try_as_json_has_every_rate(tiny_try, problem, capsys):
    pytest.importorskip("tyro")
    assert cli.main(["try", "a.safetensors", "--against", "adamw", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"]["tiny"]["adamw"]["losses"] == heldout.tune(problem, "adamw")["losses"]
    assert found["score"]["a.safetensors"] == found["problems"]["tiny"]["a.safetensors"]["score"]


def test_try_names_what_it_does_not_know(tiny_try, capsys):
    pytest.importorskip("tyro")
    assert cli.main(["try", "a.safetensors", "--against", "adamx"]) == 2
    assert "'adamx' is none of adamw, muon and no rule" in capsys.readouterr().err


def test_try_takes_another_rate_for_adam_and_refuses_none(tiny_try, problem, capsys):
    pytest.importorskip("tyro")
    options = ["--against", "adamw", "--json", "--adam-multiplier"]
    assert cli.main(["try", "a.safetensors", *options, "20"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["adam_multiplier"] == 20.0
    ours = found["problems"]["tiny"]["a.safetensors"]
    assert ours["losses"] == heldout.tune(problem, GOOD, 20.0)["losses"]
    assert cli.main(["try", "a.safetensors", *options, "0"]) == 2
    assert "adam_multiplier=0.0 must be a positive number" in capsys.readouterr().err
