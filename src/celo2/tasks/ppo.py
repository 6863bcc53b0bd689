"""Proximal policy optimization on MinAtar games: a trainer whose steps are PPO iterations."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from celo2.tasks import minatar
from celo2.tasks.minatar import GAMES, GameStates, Samples
from celo2.tasks.task import Trainer


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


class PPOState(NamedTuple):
    """The learner, the games it is playing, and the environment steps it has taken."""

    params: Any
    optimizer: Any
    games: GameStates
    env_steps: Array


def ppo_trainer(config: PPOConfig, tx: optax.GradientTransformation) -> Trainer:
    """The trainer whose step plays `config.rollout` actions everywhere, then learns from them.

    `tx` sees the bare gradients, `config.updates_per_step` times a step: clipping and schedule are
    its own; the paper clips the global norm to 0.5 and lets the rate fall linearly to zero. A
    step's `return`, and `evaluate`'s, is the mean over the environments' latest finished training
    episodes, as in the paper's curves: higher is better. No games are played for evaluation, and
    its key is not used. `over_seeds` trains several.

    >>> config = PPOConfig("breakout")
    >>> trainer = ppo_trainer(config, optax.adamw(1e-3))
    >>> state = trainer.init(jax.random.key(0))
    >>> state, metrics = trainer.step(state, jax.random.key(1))  # doctest: +SKIP
    """
    game = minatar.load_game(config.game)

    def init(key):
        network_key, game_key = jax.random.split(key)
        params = minatar.init_actor_critic(network_key, game.inputs, game.actions, config.hidden)
        games = minatar.start_games(game, game_key, config.environments)
        return PPOState(params, tx.init(params), games, jnp.zeros((), jnp.int32))

    def step(state, key):
        play_key, learn_key = jax.random.split(key)
        params, optimizer = state.params, state.optimizer
        games, samples = minatar.play_games(game, params, state.games, play_key, config.rollout)
        last_value = minatar.state_value(params, games.observation)
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
    advantage = minatar.advantage_estimates(samples, last_value, config.discount, config.trace)
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
        grads, losses = jax.grad(partial(ppo_loss, config), has_aux=True)(params, part)
        updates, optimizer = tx.update(grads, optimizer, params, value=losses["loss"])
        return (optax.apply_updates(params, updates), optimizer), losses

    keys = jax.random.split(key, config.epochs)
    rows = jax.vmap(lambda key: shuffled_minibatches(key, count, config.minibatches))(keys)
    rows = rows.reshape(config.updates_per_step, -1)
    carry, losses = jax.lax.scan(update, (params, optimizer), rows)
    return carry, jax.tree.map(jnp.mean, losses)


def shuffled_minibatches(key: Array, count: int, minibatches: int) -> Array:
    """[minibatches, count / minibatches]: every index below `count` once, in random order."""
    return jax.random.permutation(key, count).reshape(minibatches, -1)


def ppo_loss(config: PPOConfig, params: dict, batch: Batch) -> tuple[Array, dict[str, Array]]:
    """The clipped policy loss, plus the clipped value loss, minus the entropy bonus."""
    logits = minatar.policy_logits(params, batch.observation)
    value = minatar.state_value(params, batch.observation)
    centred = batch.advantage - jnp.mean(batch.advantage)
    advantage = centred / (jnp.std(batch.advantage) + 1e-8)

    ratio = jnp.exp(minatar.action_log_probability(logits, batch.action) - batch.log_probability)
    near = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
    policy_loss = -jnp.mean(jnp.minimum(ratio * advantage, near * advantage))

    target = batch.advantage + batch.value
    near = batch.value + jnp.clip(value - batch.value, -config.clip, config.clip)
    errors = jnp.maximum(jnp.square(value - target), jnp.square(near - target))
    value_loss = 0.5 * jnp.mean(errors)

    entropy = jnp.mean(minatar.policy_entropy(logits))
    total = policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy
    parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return total, {"loss": total, **parts}


def game_metrics(games: GameStates) -> dict[str, Array]:
    """The games' mean return, and how many episodes have ended."""
    return {"return": minatar.mean_return(games), "episodes": jnp.sum(games.episodes)}
