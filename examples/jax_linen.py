"""Classifies scikit-learn's 8×8 digits with Celo2 and flax linen's TrainState.

    pip install 'celo2[jax]' flax scikit-learn
    python examples/jax_linen.py [--epochs 5]

Ten seconds on one core; nothing is downloaded.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

from celo2.jax import celo2, explain, skipped

BATCH = 64


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):  # [B, 8, 8, 1]
        for i, width in enumerate((16, 32)):
            x = nn.relu(nn.Conv(width, (3, 3), name=f"conv_{i}")(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10, name="head")(x.reshape(len(x), -1))


@jax.jit
def train_step(state: TrainState, x, y):
    def loss(params):
        logits = state.apply_fn({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value  # passes the parameters to the optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    images, labels = map(jnp.asarray, load_digits(return_X_y=True))
    images = images.reshape(-1, 8, 8, 1).astype(jnp.float32) / 16
    order = jax.random.permutation(jax.random.key(0), len(images))
    train, valid = order[:-360], order[-360:]

    model = ConvNet()
    params = model.init(jax.random.key(1), images[:1])["params"]
    print(explain(params))
    steps = epochs * (len(train) // BATCH)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 20, steps)
    state = TrainState.create(
        apply_fn=model.apply, params=params, tx=celo2(schedule, weight_decay=0.1)
    )

    for epoch in range(epochs):
        shuffled = jax.random.permutation(jax.random.key(2 + epoch), train)
        for start in range(0, len(train) - BATCH + 1, BATCH):
            rows = shuffled[start : start + BATCH]
            state, loss = train_step(state, images[rows], labels[rows])
        print(f"epoch {epoch}: loss {loss:.3f}")

    logits = state.apply_fn({"params": state.params}, images[valid])
    print(f"accuracy {(logits.argmax(-1) == labels[valid]).mean():.3f}")
    counts = skipped(state.opt_state)
    print(f"gradients that were not finite: {counts.rule + counts.adam}")


if __name__ == "__main__":
    main()
