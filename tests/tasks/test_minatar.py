import math
import sys
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from celo2 import routing, rule
from celo2.tasks import minatar
from celo2.tasks.minatar import Samples
from conftest import run_python


class Row(NamedTuple):
    """One step of four games: [T, 4] each."""

    reward: np.ndarray
    done: np.ndarray
    score: np.ndarray
    time: np.ndarray


def play_randomly(game, steps):
    """The games after random actions, and the rows on the way there."""
    games = minatar.start_games(game, jax.random.key(0), 4)
    games, rows = _play(game.environment, game.actions, steps, game.settings, games)
    return games, Row(*map(np.asarray, rows))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _play(environment, actions, steps, settings, games):
    game = minatar.Game(environment, settings, 400, actions)

    def act(games, key):
        action = jax.random.randint(key, (4,), 0, actions)
        games, reward, done = minatar.advance_games(game, games, action, key)
        return games, (reward, done, games.score, games.state.time)

    return jax.lax.scan(act, games, jax.random.split(jax.random.key(1), steps))


@pytest.fixture(scope="module")
def breakout():
    return minatar.load_game("breakout")


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
    samples = Samples(None, None, None, single[0], single[1], done)
    got = minatar.advantage_estimates(samples, single[2], discount=0.9, trace=0.7)
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
    games = minatar.start_games(breakout, jax.random.key(0), 3)
    assert float(minatar.mean_return(games)) == 0
    games = games._replace(latest=jnp.array([2.0, 0.0, 5.0]), episodes=jnp.array([1, 0, 3]))
    assert float(minatar.mean_return(games)) == 3.5


def test_without_gymnax_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(ImportError, match=r"freeway needs gymnax.*pip install 'celo2\[rl\]'"):
        minatar.load_game("freeway")


def test_importing_the_tasks_does_not_import_gymnax():
    code = "import sys, celo2.tasks; print('gymnax' in sys.modules)"
    assert run_python(code, devices=1).strip() == "False"


def test_names_send_hidden_matrices_to_the_rule_and_the_rest_to_adam():
    params = jax.eval_shape(lambda key: minatar.init_actor_critic(key, 400, 5), jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [key.key for key in path]
        expected = "rule" if names[1:] in (["layer_0", "kernel"], ["layer_1", "kernel"]) else "adam"
        assert routing.route("/".join(names), leaf.shape, rule.CELO2).updater == expected, names


def test_first_policy_is_nearly_uniform():
    params = minatar.init_actor_critic(jax.random.key(0), 400, 5)
    seen = jax.random.bernoulli(jax.random.key(1), 0.1, (16, 400)).astype(jnp.float32)
    np.testing.assert_allclose(jax.nn.softmax(minatar.policy_logits(params, seen)), 0.2, atol=0.01)
    singular = np.linalg.svd(params["critic"]["layer_0"]["kernel"], compute_uv=False)
    np.testing.assert_allclose(singular, math.sqrt(2), rtol=1e-4)
