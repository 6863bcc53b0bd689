"""Meta-trains a rule on a task of your own: an autoencoder of 8×8 digits.

    python examples/own_task.py [--out runs/own_task] [--iterations 100]
or, in the folder of this file,

    celo2 meta-train --task own_task:make --loss-limit 0.5 --out runs/own_task

A minute on two cores; a rule worth using takes many more iterations.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

from celo2 import RuleConfig
from celo2.jax import celo2
from celo2.metatrain import MetaConfig, metatrain
from celo2.tasks import Task, load_images, supervised

PIXELS, CODE, BATCH = 64, 8, 32


def make() -> Task:
    """Three pure functions and the data they draw from."""
    digits = load_images("digits")
    data = {"train": jnp.asarray(digits.train_x), "valid": jnp.asarray(digits.test_x)}

    def init(key):
        first, second = jax.random.split(key)
        return {
            "encoder": {"kernel": jax.random.normal(first, (PIXELS, CODE)) / PIXELS**0.5},
            "decoder": {"kernel": jax.random.normal(second, (CODE, PIXELS)) / CODE**0.5},
        }

    def sample(data, key, split):
        rows = jax.random.randint(key, (BATCH,), 0, len(data[split]))
        return data[split][rows].reshape(BATCH, PIXELS) / 255.0

    def loss(params, x):
        code = jnp.tanh(x @ params["encoder"]["kernel"])
        value = jnp.mean((code @ params["decoder"]["kernel"] - x) ** 2)
        return value, {"loss": value}

    return Task(init, sample, loss, data)


def final_loss(optimizer, steps: int = 300) -> float:
    trainer = supervised(make(), optimizer)
    state = trainer.init(jax.random.key(0))
    for key in jax.random.split(jax.random.key(1), steps):
        state, _ = trainer.step(state, key)
    return float(trainer.evaluate(state, jax.random.key(2))["loss"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/own_task")
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args()
    config = MetaConfig(
        rule=RuleConfig(hidden=(4,)),
        iterations=options.iterations,
        problems=4,
        truncation=20,
        unroll=(20, 200),
        learning_rate=3e-3,
        loss_limit=0.5,  # losses above it count as this: set it for your task
    )
    for row in metatrain(config, options.out, task=make(), resume=True):
        if row["kind"] == "train":
            print(f"iteration {row['iteration']:5d}  meta-loss {row['loss']:.4f}")
    print(f"AdamW    {final_loss(optax.adamw(3e-3)):.4f}")
    print(f"own rule {final_loss(celo2(1e-3, rule=f'{options.out}/rule.safetensors')):.4f}")


if __name__ == "__main__":
    main()
