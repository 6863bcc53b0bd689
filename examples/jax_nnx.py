"""Trains a small byte-level transformer with AdamW and with Celo2 in flax NNX.

    pip install 'celo2[jax]' flax
    python examples/jax_nnx.py [--steps 150]

Half a minute on one core. The text is Python's own documentation; nothing is downloaded.
"""

import argparse
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from celo2.jax import celo2, explain

BYTES, WIDTH, HEADS, LENGTH, BATCH = 256, 64, 2, 64, 16


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):  # [B, T, D]
        x = x + self.attention(self.norm_1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class LanguageModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, layers: int = 2):
        self.embed = nnx.Embed(BYTES, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, BYTES, rngs=rngs)

    def __call__(self, tokens):  # [B, T]
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: LanguageModel, tokens) -> jax.Array:
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train_step(model: LanguageModel, optimizer: nnx.Optimizer, tokens) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, grads)  # passes the parameters to the optimizer
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    text = jnp.frombuffer("\n".join(topics.values()).encode(), jnp.uint8).astype(jnp.int32)
    print(explain(nnx.to_pure_dict(nnx.state(LanguageModel(nnx.Rngs(0)), nnx.Param))))
    for name, make, rate in (("AdamW", optax.adamw, 8e-3), ("Celo2", celo2, 4e-3)):
        model = LanguageModel(nnx.Rngs(0))
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps)
        optimizer = nnx.Optimizer(model, make(schedule), wrt=nnx.Param)
        for key in jax.random.split(jax.random.key(0), steps):
            starts = jax.random.randint(key, (BATCH, 1), 0, len(text) - LENGTH)
            loss = train_step(model, optimizer, text[starts + jnp.arange(LENGTH + 1)])
        print(f"{name}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
