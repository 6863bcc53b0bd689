"""MinAtar games and the policy that plays them: networks, parallel games, advantages."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from celo2.tasks.networks import dense

GAMES = {
    "asterix": "Asterix-MinAtar",
    "breakout": "Breakout-MinAtar",
    "freeway": "Freeway-MinAtar",
    "spaceinvaders": "SpaceInvaders-MinAtar",
}

POLICY_GAIN = 0.01  # small, so that the first policy is nearly uniform
VALUE_GAIN = 1.0


class Game(NamedTuple):
    """A game's rules: gymnax's environment and its settings, and the sizes a network needs."""

    environment: Any
    settings: Any
    inputs: int
    actions: int


class GameStates(NamedTuple):
    """Several games under way, one per leading index, and the scores kept of them."""

    state: Any  # gymnax's
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


def start_games(game: Game, key: Array, environments: int) -> GameStates:
    """Fresh games, all at the beginning of their first episode."""
    reset = jax.vmap(game.environment.reset, (0, None))
    observation, state = reset(jax.random.split(key, environments), game.settings)
    nothing = jnp.zeros(environments)
    return _with_fixed_types(
        GameStates(
            state, _flat_observation(observation), nothing, nothing, nothing.astype(jnp.int32)
        )
    )


def play_games(
    game: Game, params: dict, games: GameStates, key: Array, steps: int
) -> tuple[GameStates, Samples]:
    """The games `steps` actions later, drawn from the policy; ended ones begin anew."""

    def act(games: GameStates, key: Array) -> tuple[GameStates, Samples]:
        action_key, game_key = jax.random.split(key)
        seen = games.observation
        logits = policy_logits(params, seen)
        action = jax.random.categorical(action_key, logits)
        log_probability = action_log_probability(logits, action)
        value = state_value(params, seen)
        games, reward, done = advance_games(game, games, action, game_key)
        return games, Samples(seen, action, log_probability, value, reward, done)

    return jax.lax.scan(act, games, jax.random.split(key, steps))


def advance_games(
    game: Game, games: GameStates, action: Array, key: Array
) -> tuple[GameStates, Array, Array]:  # …, reward [E], done [E]
    """The games after one action each, with rewards and ends of episodes."""
    step = jax.vmap(game.environment.step, (0, 0, 0, None))
    keys = jax.random.split(key, len(action))
    observation, state, reward, terminated, truncated, _ = step(
        keys, games.state, action, game.settings
    )
    done = terminated | truncated
    score = games.score + reward
    after = GameStates(
        state,
        _flat_observation(observation),
        jnp.where(done, 0.0, score),
        jnp.where(done, score, games.latest),
        games.episodes + done.astype(jnp.int32),
    )
    return _with_fixed_types(after), reward, done


def mean_return(games: GameStates) -> Array:
    """The mean return of each environment's latest finished episode.

    Environments that have finished none are left out; 0 as long as all are.
    """
    finished = games.episodes > 0
    return jnp.sum(games.latest * finished) / jnp.maximum(jnp.sum(finished), 1)


def advantage_estimates(
    samples: Samples, last_value: Array, discount: float, trace: float
) -> Array:
    """[T, E]: generalised advantage estimates, `trace` being their λ.

    The end of an episode is worth nothing further, also where only its time was up: as in the
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


def _flat_observation(observation: Array) -> Array:
    return observation.reshape(len(observation), -1)


def _with_fixed_types(tree: Any) -> Any:
    # gymnax's first states hold Python numbers: with their weak types the second step of a
    # trainer would compile anew.
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), tree)


# The policy and the value function, two separate small networks for flat observations.


def init_actor_critic(
    key: Array, inputs: int, actions: int, hidden: Sequence[int] = (64, 64)
) -> dict:
    """`actor` with a `policy_head`, `critic` with a `value_head`: orthogonal, zero biases."""
    actor_key, critic_key = jax.random.split(key)
    return {
        "actor": _init_network(actor_key, inputs, hidden, "policy_head", actions, POLICY_GAIN),
        "critic": _init_network(critic_key, inputs, hidden, "value_head", 1, VALUE_GAIN),
    }


def policy_logits(params: dict, x: Array) -> Array:
    """[B, actions] from observations [B, inputs]."""
    return dense(params["actor"]["policy_head"], _hidden(params["actor"], x))


def state_value(params: dict, x: Array) -> Array:
    """[B]: the discounted reward expected from observations [B, inputs]."""
    return dense(params["critic"]["value_head"], _hidden(params["critic"], x))[:, 0]


def action_log_probability(logits: Array, actions: Array) -> Array:
    """[B]: the logarithm of the chosen actions' probability."""
    # One-hot, not a gather: the gradient of a gather is a scatter, which is slow on CPUs.
    chosen = jax.nn.one_hot(actions, logits.shape[-1])
    return jnp.sum(jax.nn.log_softmax(logits) * chosen, axis=-1)


def policy_entropy(logits: Array) -> Array:
    """[B]: the policies' entropy in nats."""
    return -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=-1)


@partial(jax.jit, static_argnums=(1, 2))  # one compilation per shape, as in networks.py
def orthogonal(key: Array, shape: tuple[int, int], gain: float) -> Array:
    """A kernel (in, out) whose singular values are all `gain`."""
    return jax.nn.initializers.orthogonal(gain)(key, shape)


def _init_network(
    key: Array, inputs: int, hidden: Sequence[int], head: str, outputs: int, gain: float
) -> dict:
    keys = jax.random.split(key, len(hidden) + 1)
    names = [*(f"layer_{i}" for i in range(len(hidden))), head]
    gains = [*(math.sqrt(2.0) for _ in hidden), gain]
    shapes = zip((inputs, *hidden), (*hidden, outputs), strict=True)
    return {
        name: {"kernel": orthogonal(k, shape, g), "bias": jnp.zeros(shape[1])}
        for name, k, shape, g in zip(names, keys, shapes, gains, strict=True)
    }


def _hidden(network: dict, x: Array) -> Array:
    for i in range(len(network) - 1):
        x = jnp.tanh(dense(network[f"layer_{i}"], x))
    return x
