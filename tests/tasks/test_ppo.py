import dataclasses
import math
import sys
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from celo2 import routing, rule
from celo2.jax import celo2
from celo2.tasks import TASKS, over_seeds, ppo
from celo2.tasks.ppo import PPOConfig
from conftest import run_python

TINY = PPOConfig("breakout", environments=4, rollout=16, epochs=2, minibatches=2, hidden=(8, 8))


ADAMW = partial(optax.adamw, eps=1e-5, weight_decay=0.0)  # the paper's


def clipped(optimizer):
    """The optimizer behind the paper's clip."""
    return optax.chain(optax.clip_by_global_norm(0.5), optimizer)


@pytest.fixture(scope="module")
def trainer():
    return ppo.ppo_trainer(TINY, clipped(ADAMW(1e-3)))


def random_batch(config, inputs=5, actions=3, size=32):
    """A network, and samples of which some lie outside each of the clips."""
    draw = np.random.RandomState(0)
    params = ppo.init_actor_critic(jax.random.key(0), inputs, actions, config.hidden)
    params["actor"]["policy_head"]["kernel"] *= 100.0
    batch = ppo.Batch(
        draw.randn(size, inputs),
        draw.randint(0, actions, size),
        np.log(draw.uniform(0.1, 0.9, size)),
        draw.randn(size),
        draw.randn(size),
    )
    return params, ppo.Batch(*map(jnp.asarray, batch))


def test_iteration_is_the_papers():
    config = PPOConfig()
    assert config.updates_per_step == 32
    assert 10_000_000 // config.samples == 1220
    assert config.samples == 64 * 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"game": "pong"}, "game='pong' is not one of asterix, breakout"),
        ({"environments": 0}, "environments=0 must be at least 1"),
        ({"minibatches": 7}, "minibatches=7 must divide environments × rollout = 8192"),
        ({"discount": 1.01}, "discount=1.01 must be between 0 and 1"),
        ({"clip": -0.1}, "clip=-0.1 must not be negative"),
        ({"value_weight": math.nan}, "value_weight=nan must not be negative"),
        ({"hidden": ()}, "must name the width of one layer or more"),
    ],
)
def test_impossible_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**changes)


def test_loss_is_that_of_a_plain_loop():
    config = dataclasses.replace(TINY, clip=0.3, entropy_weight=0.05, value_weight=0.7)
    params, batch = random_batch(config)
    total, metrics = jax.jit(partial(ppo.ppo_loss, config))(params, batch)

    def network(layers, head, x):
        for name in ("layer_0", "layer_1"):
            x = np.tanh(x @ np.float64(layers[name]["kernel"]) + np.float64(layers[name]["bias"]))
        return x @ np.float64(layers[head]["kernel"]) + np.float64(layers[head]["bias"])

    policy, value, entropy, clipped = 0.0, 0.0, 0.0, [0, 0]
    columns = [np.asarray(x, np.float64) for x in batch]
    mean, deviation = columns[-1].mean(), columns[-1].std()
    for x, action, old_log, old_value, raw in zip(*columns, strict=True):
        logits = network(params["actor"], "policy_head", x)
        new_value = network(params["critic"], "value_head", x)[0]
        p = np.exp(logits) / np.exp(logits).sum()
        ratio, advantage = p[int(action)] / np.exp(old_log), (raw - mean) / deviation
        policy -= min(ratio * advantage, min(max(ratio, 0.7), 1.3) * advantage)
        near = old_value + min(max(new_value - old_value, -0.3), 0.3)
        target = raw + old_value
        value += 0.5 * max((new_value - target) ** 2, (near - target) ** 2)
        entropy -= (p * np.log(p)).sum()
        clipped[0] += not 0.7 < ratio < 1.3
        clipped[1] += near != new_value
    assert all(0 < count < 32 for count in clipped)
    expected = {"policy_loss": policy / 32, "value_loss": value / 32, "entropy": entropy / 32}
    for name, number in expected.items():
        assert float(metrics[name]) == pytest.approx(number, rel=1e-4), name
    whole = (policy + 0.7 * value - 0.05 * entropy) / 32
    assert float(total) == float(metrics["loss"]) == pytest.approx(whole, rel=1e-4)


def test_learning_takes_every_epoch_and_minibatch_in_a_new_order():
    seen = []

    def record(updates, state, params=None):
        return jax.tree.map(jnp.zeros_like, updates), state + 1

    def spy(config, params, batch):
        jax.debug.callback(lambda x: seen.append(np.sort(np.asarray(x))), batch.value)
        return jnp.zeros(()), {}

    config = dataclasses.replace(TINY, rollout=8, epochs=3, minibatches=4)
    params, batch = random_batch(config)
    batch = batch._replace(value=jnp.arange(32.0))
    tx = optax.with_extra_args_support(optax.GradientTransformation(lambda params: 0, record))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "ppo_loss", spy)
        (_, count), _ = ppo.learn(config, tx, params, 0, batch, jax.random.key(0))
        jax.effects_barrier()
    assert count == len(seen) == config.updates_per_step == 12
    epochs = {tuple(part[0]) for part in zip(seen, strict=True)}
    assert len(epochs) == 12, "two epochs were cut the same way"
    np.testing.assert_array_equal(np.bincount(np.concatenate(seen).astype(int)), np.full(32, 3))


def test_same_keys_give_the_same_run(trainer):
    def run(seed):
        state = trainer.init(jax.random.key(seed))
        for key in jax.random.split(jax.random.key(seed + 1), 2):
            state, metrics = trainer.step(state, key)
        return state, metrics, trainer.evaluate(state, key)

    first, again, other = run(0), run(0), run(7)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert float(first[1]["loss"]) != float(other[1]["loss"])


def test_step_counts_its_steps_and_keeps_the_states_form(trainer):
    state = trainer.init(jax.random.key(0))
    after, metrics = trainer.step(state, jax.random.key(1))
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, after)
    assert int(metrics["env_steps"]) == 64
    assert after.games.observation.shape == (4, 400)
    names = {"return", "episodes", "env_steps", "loss", "policy_loss", "value_loss", "entropy"}
    assert metrics.keys() == names
    assert trainer.evaluate(after, jax.random.key(0)).keys() == {"return", "episodes"}
    assert 0 < float(metrics["entropy"]) <= math.log(3) + 1e-6


def test_several_seeds_train_side_by_side(trainer):
    several, keys = over_seeds(trainer), jax.random.split(jax.random.key(0), 3)
    state = jax.eval_shape(several.init, keys)
    after, metrics = jax.eval_shape(several.step, state, keys)
    assert after == state and after.games.observation.shape == (3, 4, 400)
    scores = jax.eval_shape(several.evaluate, state, keys)
    assert scores["return"].shape == metrics["loss"].shape == (3,)


@pytest.mark.parametrize("game", ppo.GAMES)
def test_every_game_is_in_the_table_and_trains_under_celo2(game):
    spec = TASKS[f"minatar-{game}"]
    assert spec.higher_is_better and spec.updates_per_step == spec.make().updates_per_step
    assert spec.make().environments == spec.batch and spec.make() == PPOConfig(game)
    trainer = spec.train(spec.make(batch=2, rollout=8, hidden=(8,)), celo2(1e-3))
    state = jax.eval_shape(trainer.init, jax.random.key(0))
    after, _ = jax.eval_shape(trainer.step, state, jax.random.key(1))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert spec.metric in jax.eval_shape(trainer.evaluate, state, jax.random.key(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "rate"), [(ADAMW, 1e-3), (celo2, 4.64e-4)], ids=["adamw", "celo2"]
)
def test_return_rises_on_breakout(optimizer, rate):
    config, iterations = PPOConfig("breakout"), 24
    schedule = optax.linear_schedule(rate, 0.0, iterations * config.updates_per_step)
    trainer = ppo.ppo_trainer(config, clipped(optimizer(schedule)))
    state, returns = trainer.init(jax.random.key(0)), []
    for key in jax.random.split(jax.random.key(1), iterations):
        state, metrics = trainer.step(state, key)
        returns.append(float(metrics["return"]))
    # A random player has 0.3; in runs of 500,000 steps both were at 5 or more by this point.
    assert np.mean(returns[:2]) < 1
    assert np.mean(returns[-3:]) > 3


# The games.


class Row(NamedTuple):
    """One step of four games: [T, 4] each."""

    reward: np.ndarray
    done: np.ndarray
    score: np.ndarray
    time: np.ndarray


def play_randomly(game, steps):
    """The games after random actions, and the rows on the way there."""
    games = ppo.start_games(game, jax.random.key(0), 4)
    games, rows = _play(game.environment, game.actions, steps, game.settings, games)
    return games, Row(*map(np.asarray, rows))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _play(environment, actions, steps, settings, games):
    game = ppo.Game(environment, settings, 400, actions)

    def act(games, key):
        action = jax.random.randint(key, (4,), 0, actions)
        games, reward, done = ppo.advance_games(game, games, action, key)
        return games, (reward, done, games.score, games.state.time)

    return jax.lax.scan(act, games, jax.random.split(jax.random.key(1), steps))


@pytest.fixture(scope="module")
def breakout():
    return ppo.load_game("breakout")


def test_advantages_are_those_of_a_plain_loop():
    draw = np.random.RandomState(0)
    reward, value, last = draw.randn(9, 3), draw.randn(9, 3), draw.randn(3)
    done = draw.rand(9, 3) < 0.3
    assert done.any() and not done.all()
    expected = np.zeros((9, 3))
    for e in range(3):
        for t in range(9):
            weight = 1.0  # (γλ)^k, until the episode ends
            for k in range(t, 9):
                following = last[e] if k == 8 else value[k + 1, e]
                delta = reward[k, e] + 0.9 * following * (not done[k, e]) - value[k, e]
                expected[t, e] += weight * delta
                if done[k, e]:
                    break
                weight *= 0.9 * 0.7
    single = [x.astype(np.float32) for x in (value, reward, last)]
    samples = ppo.Samples(None, None, None, single[0], single[1], done)
    got = ppo.advantage_estimates(samples, single[2], discount=0.9, trace=0.7)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_scores_are_kept_by_episode_and_ended_games_begin_anew(breakout):
    games, rows = play_randomly(breakout, 120)
    score, latest, episodes = np.zeros(4), np.zeros(4), np.zeros(4)
    for t in range(120):
        score += rows.reward[t]
        latest, episodes = np.where(rows.done[t], score, latest), episodes + rows.done[t]
        score = np.where(rows.done[t], 0, score)
        np.testing.assert_array_equal(rows.score[t], score)
        np.testing.assert_array_equal(rows.time[t] == 0, rows.done[t])
    np.testing.assert_array_equal(games.latest, latest)
    np.testing.assert_array_equal(games.episodes, episodes)
    assert episodes.min() > 1 and latest.max() > 0


def test_episode_ends_when_its_time_is_up(breakout):
    brief = breakout.settings.replace(max_steps_in_episode=3)
    done = play_randomly(breakout._replace(settings=brief), 120)[1].done
    np.testing.assert_array_equal(done, np.tile([[False], [False], [True]], (40, 4)))


def test_return_leaves_out_games_without_a_finished_episode(breakout):
    games = ppo.start_games(breakout, jax.random.key(0), 3)
    assert float(ppo.game_metrics(games)["return"]) == 0
    games = games._replace(latest=jnp.array([2.0, 0.0, 5.0]), episodes=jnp.array([1, 0, 3]))
    assert float(ppo.game_metrics(games)["return"]) == 3.5


def test_without_gymnax_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(ImportError, match=r'needs gymnax .*pip install "celo2\[rl\]"'):
        ppo.load_game("freeway")


def test_importing_the_tasks_does_not_import_gymnax():
    code = "import sys, celo2.tasks; print('gymnax' in sys.modules)"
    assert run_python(code, devices=1).strip() == "False"


def test_names_send_hidden_matrices_to_the_rule_and_the_rest_to_adam():
    params = jax.eval_shape(lambda key: ppo.init_actor_critic(key, 400, 5), jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [key.key for key in path]
        expected = "rule" if names[1:] in (["layer_0", "kernel"], ["layer_1", "kernel"]) else "adam"
        assert routing.route("/".join(names), leaf.shape, rule.CELO2).updater == expected, names


def test_first_policy_is_nearly_uniform():
    params = ppo.init_actor_critic(jax.random.key(0), 400, 5)
    seen = jax.random.bernoulli(jax.random.key(1), 0.1, (16, 400)).astype(jnp.float32)
    np.testing.assert_allclose(jax.nn.softmax(ppo.policy_logits(params, seen)), 0.2, atol=0.01)
    singular = np.linalg.svd(params["critic"]["layer_0"]["kernel"], compute_uv=False)
    np.testing.assert_allclose(singular, math.sqrt(2), rtol=1e-4)
