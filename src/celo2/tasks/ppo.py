"""Proximal policy optimization on MinAtar games: a trainer whose steps are PPO iterations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from celo2.rulefile import import_extra
from celo2.tasks.networks import dense
from celo2.tasks.task import Trainer

GAMES = {
    "asterix": "Asterix-MinAtar",
    "breakout": "Breakout-MinAtar",
    "freeway": "Freeway-MinAtar",
    "spaceinvaders": "SpaceInvaders-MinAtar",
}

POLICY_GAIN = 0.01  # small, so that the first policy is nearly uniform
VALUE_GAIN = 1.0


@dataclass(frozen=True)
class PPOConfig:
    """The paper's table for PPO; `epochs` and `minibatches` are not in it.

    They are those which purejaxrl, the framework it names, uses for these games.
    """

    game: str = "asterix"
    environments: int = 64
    rollout: int = 128  # actions per environment and iteration
    epochs: int = 4
    minibatches: int = 8
    discount: float = 0.99
    trace: float = 0.95  # GAE's λ
    clip: float = 0.2
    entropy_weight: float = 0.01
    value_weight: float = 0.5
    hidden: tuple[int, ...] = (64, 64)

    def __post_init__(self):
        if self.game not in GAMES:
            raise ValueError(f"game={self.game!r} is not one of {', '.join(GAMES)}.")
        for name in ("environments", "rollout", "epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("discount", "trace"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1.")
        for name in ("clip", "entropy_weight", "value_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative.")
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"hidden={self.hidden} must name the width of one layer or more.")
        if self.samples % self.minibatches:
            raise ValueError(
                f"minibatches={self.minibatches} must divide environments × rollout = "
                f"{self.samples}."
            )

    @property
    def samples(self) -> int:
        """Environment steps of one iteration."""
        return self.environments * self.rollout

    @property
    def updates_per_step(self) -> int:
        """The optimizer's updates in one iteration."""
        return self.epochs * self.minibatches


# The games, played in parallel.


class Game(NamedTuple):
    """A game's rules: gymnax's environment and its settings, and the sizes a network needs."""

    environment: Any
    settings: Any
    inputs: int
    actions: int


class GameStates(NamedTuple):
    """The states of several games, one per leading index, and their scores."""

    state: Any  # gymnax's
    observation: Array  # [E, inputs]
    score: Array  # [E], reward so far in the present episode
    latest: Array  # [E], return of the latest finished episode
    episodes: Array  # [E], finished episodes


class Samples(NamedTuple):
    """Observations, actions and rewards of a rollout; each [T, E, …]."""

    observation: Array
    action: Array
    log_probability: Array  # of the action, under the policy that took it
    value: Array
    reward: Array
    done: Array  # the action ended its episode


def load_game(name: str) -> Game:
    """The MinAtar game of that name, with its minimal set of actions.

    gymnax is imported here and not with the module: the import takes seconds.
    """
    gymnax = import_extra("gymnax", "rl")
    environment, settings = gymnax.make(GAMES[name])
    height, width, channels = environment.obs_shape
    return Game(environment, settings, height * width * channels, environment.num_actions)


def start_games(game: Game, key: Array, environments: int) -> GameStates:
    """Fresh games, all at the beginning of their first episode."""
    reset = jax.vmap(game.environment.reset, (0, None))
    observation, state = reset(jax.random.split(key, environments), game.settings)
    observation, zeros = observation.reshape(environments, -1), jnp.zeros(environments)
    return _with_fixed_types(GameStates(state, observation, zeros, zeros, zeros.astype(jnp.int32)))


def play_games(
    game: Game, params: dict, games: GameStates, key: Array, steps: int
) -> tuple[GameStates, Samples]:
    """The games after `steps` actions drawn from the policy; finished games restart."""

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
        observation.reshape(len(action), -1),
        jnp.where(done, 0.0, score),
        jnp.where(done, score, games.latest),
        games.episodes + done.astype(jnp.int32),
    )
    return _with_fixed_types(after), reward, done


def game_metrics(games: GameStates) -> dict[str, Array]:
    """How many episodes have ended, and the mean return of each environment's latest one.

    Environments that have finished none are left out; 0 as long as all are.
    """
    finished = games.episodes > 0
    mean = jnp.sum(games.latest * finished) / jnp.maximum(jnp.sum(finished), 1)
    return {"return": mean, "episodes": jnp.sum(games.episodes)}


def advantage_estimates(
    samples: Samples, last_value: Array, discount: float, trace: float
) -> Array:
    """[T, E]: generalised advantage estimates, `trace` being their λ.

    The value after the end of an episode is 0, also where it was truncated, as in the framework
    that the paper's experiments use.
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


# Training.


class PPOState(NamedTuple):
    """The learner, the games it is playing, and the environment steps it has taken."""

    params: Any
    optimizer: Any
    games: GameStates
    env_steps: Array


def ppo_trainer(config: PPOConfig, tx: optax.GradientTransformation) -> Trainer:
    """The trainer whose step plays `config.rollout` actions in each game, then learns from them.

    `tx` is called `config.updates_per_step` times a step and must clip and schedule itself; the
    paper clips the global norm to 0.5 and decays the rate linearly to zero. The `return` of a step
    and of `evaluate` is the mean over the environments' latest finished training episodes, as in
    the paper's curves: higher is better. No games are played for evaluation, and its key is not
    used. `over_seeds` trains several.

    >>> config = PPOConfig("breakout")
    >>> trainer = ppo_trainer(config, optax.adamw(1e-3))
    >>> state = trainer.init(jax.random.key(0))  # doctest: +SKIP
    >>> state, metrics = trainer.step(state, jax.random.key(1))  # doctest: +SKIP
    """
    game = load_game(config.game)

    def init(key):
        network_key, game_key = jax.random.split(key)
        params = init_actor_critic(network_key, game.inputs, game.actions, config.hidden)
        games = start_games(game, game_key, config.environments)
        return PPOState(params, tx.init(params), games, jnp.zeros((), jnp.int32))

    def step(state, key):
        play_key, learn_key = jax.random.split(key)
        params, optimizer = state.params, state.optimizer
        games, samples = play_games(game, params, state.games, play_key, config.rollout)
        last_value = state_value(params, games.observation)
        batch = label_samples(config, samples, last_value)
        (params, optimizer), losses = learn(config, tx, params, optimizer, batch, learn_key)
        env_steps = state.env_steps + config.samples
        metrics = {**losses, **game_metrics(games), "env_steps": env_steps}
        return PPOState(params, optimizer, games, env_steps), metrics

    return Trainer(init, jax.jit(step), jax.jit(lambda state, key: game_metrics(state.games)))


class Batch(NamedTuple):
    """Samples to learn from, in any order."""

    observation: Array  # [B, inputs]
    action: Array  # the rest [B]
    log_probability: Array
    value: Array
    advantage: Array


def label_samples(config: PPOConfig, samples: Samples, last_value: Array) -> Batch:
    """A rollout's samples in one row, with their advantages."""
    advantage = advantage_estimates(samples, last_value, config.discount, config.trace)
    batch = Batch(*samples[:4], advantage)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)


def learn(
    config: PPOConfig,
    tx: optax.GradientTransformation,
    params: Any,
    optimizer: Any,
    batch: Batch,
    key: Array,
) -> tuple[tuple[Any, Any], dict[str, Array]]:
    """Params and optimizer after all epochs, and the losses' mean over the updates."""
    count = len(batch.action)
    tx = optax.with_extra_args_support(tx)

    def update(carry, rows):
        params, optimizer = carry
        part = jax.tree.map(lambda x: x[rows], batch)
        loss = jax.value_and_grad(partial(ppo_loss, config), has_aux=True)
        (value, losses), grads = loss(params, part)
        updates, optimizer = tx.update(grads, optimizer, params, value=value)
        return (optax.apply_updates(params, updates), optimizer), losses

    keys = jax.random.split(key, config.epochs)
    # Each epoch takes every sample once, in a new order.
    orders = jax.vmap(lambda key: jax.random.permutation(key, count))(keys)
    rows = orders.reshape(config.updates_per_step, -1)
    carry, losses = jax.lax.scan(update, (params, optimizer), rows)
    return carry, jax.tree.map(jnp.mean, losses)


def ppo_loss(config: PPOConfig, params: dict, batch: Batch) -> tuple[Array, dict[str, Array]]:
    """The clipped policy loss, plus the clipped value loss, minus the entropy bonus."""
    logits = policy_logits(params, batch.observation)
    value = state_value(params, batch.observation)
    centred = batch.advantage - jnp.mean(batch.advantage)
    advantage = centred / (jnp.std(batch.advantage) + 1e-8)

    ratio = jnp.exp(action_log_probability(logits, batch.action) - batch.log_probability)
    near = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
    policy_loss = -jnp.mean(jnp.minimum(ratio * advantage, near * advantage))

    target = batch.advantage + batch.value
    near = batch.value + jnp.clip(value - batch.value, -config.clip, config.clip)
    errors = jnp.maximum(jnp.square(value - target), jnp.square(near - target))
    value_loss = 0.5 * jnp.mean(errors)

    entropy = jnp.mean(policy_entropy(logits))
    total = policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy
    parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return total, {"loss": total, **parts}
