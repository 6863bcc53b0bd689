"""Classifies scikit-learn's 8×8 digits with AdamW and with Celo2 in Equinox.

    pip install 'celo2[jax]' equinox scikit-learn
    python examples/jax_equinox.py [--steps 200]

Ten seconds on one core; nothing is downloaded.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from celo2.jax import celo2, explain
from celo2.routing import MatrixView

BATCH = 64
# Equinox stores (out, in). A view also gives its tensor to the rule, so the head is named before.
OVERRIDES = {"head": "adam", "weight$": MatrixView((), (1,), (0,))}


class Mlp(eqx.Module):
    hidden: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __init__(self, key, width: int = 64):
        first, second, last = jax.random.split(key, 3)
        self.hidden = [eqx.nn.Linear(64, width, key=first)]
        self.hidden += [eqx.nn.Linear(width, width, key=second)]
        self.head = eqx.nn.Linear(width, 10, key=last)

    def __call__(self, x):  # [64]
        for layer in self.hidden:
            x = jax.nn.relu(layer(x))
        return self.head(x)


def loss_of(model: Mlp, x, y) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


def train(tx: optax.GradientTransformation, x, y, steps: int) -> Mlp:
    model = Mlp(jax.random.key(0))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, key):
        rows = jax.random.randint(key, (BATCH,), 0, len(x))
        grads = eqx.filter_grad(loss_of)(model, x[rows], y[rows])
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    for key in jax.random.split(jax.random.key(1), steps):
        model, state = step(model, state, key)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    images, labels = map(jnp.asarray, load_digits(return_X_y=True))
    images = images.astype(jnp.float32) / 16
    params = eqx.filter(Mlp(jax.random.key(0)), eqx.is_inexact_array)
    print(explain(params, overrides=OVERRIDES))
    for name, rate, make in (
        ("AdamW", 4e-3, optax.adamw),
        ("Celo2", 1e-3, lambda schedule: celo2(schedule, overrides=OVERRIDES)),
    ):
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps)
        model = train(make(schedule), images[:-360], labels[:-360], steps)
        print(f"{name}: validation loss {loss_of(model, images[-360:], labels[-360:]):.3f}")


if __name__ == "__main__":
    main()
