"""MinAtar games played by a policy: parallel environments, episodes' returns, advantages."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from celo2.tasks import actor_critic
from celo2.tasks.actor_critic import Activation

GAMES = {
    "asterix": "Asterix-MinAtar",
    "breakout": "Breakout-MinAtar",
    "freeway": "Freeway-MinAtar",
    "spaceinvaders": "SpaceInvaders-MinAtar",
}


class Game(NamedTuple):
    """A game's rules: gymnax's environment and its settings, and the sizes a network needs."""

    environment: Any
    settings: Any
    inputs: int
    actions: int


class Tables(NamedTuple):
    """Several games under way, one per leading index, and the scores kept of them."""

    game: Any  # gymnax's state
    observation: Array  # [E, inputs]
    score: Array  # [E], reward so far in the present episode
    latest: Array  # [E], return of the latest finished episode
    episodes: Array  # [E], finished episodes


class Samples(NamedTuple):
    """What was seen, done and gained; each [T, E, …]."""

    observation: Array
    action: Array
    log_probability: Array  # of the action, under the policy that took it
    value: Array
    reward: Array
    done: Array  # the action ended its episode


def load_game(name: str) -> Game:
    """The MinAtar game of that name, with its minimal set of actions.

    gymnax is imported here and not with the module: it is an extra, and takes seconds.
    """
    try:
        import gymnax
    except ImportError as error:
        raise ImportError(
            f"{name} needs gymnax ({error}); install it with: pip install 'celo2[rl]'"
        ) from error
    environment, settings = gymnax.make(GAMES[name])
    height, width, channels = environment.obs_shape
    return Game(environment, settings, height * width * channels, environment.num_actions)


def start(game: Game, key: Array, environments: int) -> Tables:
    """Fresh games, all at the beginning of their first episode."""
    reset = jax.vmap(game.environment.reset, (0, None))
    observation, state = reset(jax.random.split(key, environments), game.settings)
    nothing = jnp.zeros(environments)
    return _strong(Tables(state, _flat(observation), nothing, nothing, nothing.astype(jnp.int32)))


def play(
    game: Game, params: dict, tables: Tables, key: Array, steps: int, activation: Activation
) -> tuple[Tables, Samples]:
    """The games `steps` actions later, drawn from the policy; ended ones begin anew."""

    def act(tables: Tables, key: Array) -> tuple[Tables, Samples]:
        action_key, game_key = jax.random.split(key)
        seen = tables.observation
        logits = actor_critic.logits(params, seen, activation)
        action = jax.random.categorical(action_key, logits)
        log_probability = actor_critic.log_probability(logits, action)
        value = actor_critic.value(params, seen, activation)
        tables, reward, done = advance(game, tables, action, game_key)
        return tables, Samples(seen, action, log_probability, value, reward, done)

    return jax.lax.scan(act, tables, jax.random.split(key, steps))


def advance(
    game: Game, tables: Tables, action: Array, key: Array
) -> tuple[Tables, Array, Array]:  # …, reward [E], done [E]
    """The games after one action each, with rewards and ends of episodes."""
    step = jax.vmap(game.environment.step, (0, 0, 0, None))
    keys = jax.random.split(key, len(action))
    observation, state, reward, terminated, truncated, _ = step(
        keys, tables.game, action, game.settings
    )
    done = terminated | truncated
    score = tables.score + reward
    after = Tables(
        state,
        _flat(observation),
        jnp.where(done, 0.0, score),
        jnp.where(done, score, tables.latest),
        tables.episodes + done.astype(jnp.int32),
    )
    return _strong(after), reward, done


def mean_return(tables: Tables) -> Array:
    """The mean return of each environment's latest finished episode.

    Environments that have finished none are left out; 0 as long as all are.
    """
    finished = tables.episodes > 0
    return jnp.sum(tables.latest * finished) / jnp.maximum(jnp.sum(finished), 1)


def advantages(samples: Samples, last_value: Array, discount: float, trace: float) -> Array:
    """[T, E]: generalised advantage estimates, `trace` being their λ.

    The end of an episode is worth nothing further, also where only its time was up: so does the
    framework which the paper's experiments use.
    """

    def back(carry, sample):
        following, later = carry
        reward, value, done = sample
        goes_on = discount * (1.0 - done)
        advantage = reward + goes_on * following - value + goes_on * trace * later
        return (value, advantage), advantage

    rows = (samples.reward, samples.value, samples.done.astype(jnp.float32))
    zeros = jnp.zeros_like(last_value)
    return jax.lax.scan(back, (last_value, zeros), rows, reverse=True)[1]


def _flat(observation: Array) -> Array:
    return observation.reshape(len(observation), -1)


def _strong(tree: Any) -> Any:
    # gymnax's first states hold Python numbers: with their weak types the second step of a
    # trainer would compile anew.
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), tree)
