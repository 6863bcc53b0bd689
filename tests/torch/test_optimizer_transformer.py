"""A whole small transformer, trained in both frameworks from the same weights and batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import celo2.jax
from celo2.tasks.networks import LMConfig, cross_entropy, init_lm, lm_logits
from celo2.torch import Celo2, Celo2Base
from rules import jit

CONFIG = LMConfig(width=32, layers=1, head_width=16, length=16, vocab=40)
STEPS, BATCH = 50, 8


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        for name in "qkvo":
            setattr(self, name, nn.Linear(width, width, bias=False))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        heads = (batch, length, width // CONFIG.head_width, CONFIG.head_width)
        normed = rms_norm(x)
        q, k, v = (getattr(self, name)(normed).view(heads).transpose(1, 2) for name in "qkv")
        q, k = rotate(rms_norm(q)), rotate(rms_norm(k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(rms_norm(x)), approximate="tanh"))


class Transformer(nn.Module):
    """`celo2.tasks.networks.lm_logits` in Torch."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CONFIG.vocab, CONFIG.width)
        self.blocks = nn.ModuleList(Block(CONFIG.width) for _ in range(CONFIG.layers))
        self.lm_head = nn.Linear(CONFIG.width, CONFIG.vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(rms_norm(x))

    def load(self, params: dict) -> None:
        """Takes JAX parameters over, kernels transposed."""
        pairs = [(self.embed.weight, params["embed"]["table"])]
        pairs.append((self.lm_head.weight, params["lm_head"]["kernel"].T))
        for i, block in enumerate(self.blocks):
            layer = params["blocks"][f"block_{i}"]
            for part in layer.values():
                pairs += [(getattr(block, name).weight, x["kernel"].T) for name, x in part.items()]
        for weight, value in pairs:
            weight.data.copy_(torch.from_numpy(np.array(value)))


def rms_norm(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def rotate(x):
    half = x.shape[-1] // 2
    waves = 10_000.0 ** (-torch.arange(half) / half)
    angle = torch.outer(torch.arange(x.shape[2]).float(), waves)
    first, second = x[..., :half], x[..., half:]
    turned = first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()
    return torch.cat(turned, -1)


def batches() -> list[np.ndarray]:
    """Sequences with something to learn: each token is its predecessor plus a step of its own."""
    rng = np.random.default_rng(0)
    starts, steps = rng.integers(CONFIG.vocab, size=(2, STEPS, BATCH, 1))
    return list((starts + steps % 5 * np.arange(CONFIG.length + 1)) % CONFIG.vocab)


def jax_losses(tx, params) -> list[float]:
    def loss(params, tokens):
        return cross_entropy(lm_logits(params, CONFIG, tokens[:, :-1]), tokens[:, 1:])

    @jit
    def step(params, state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for tokens in batches():
        params, state, value = step(params, state, jnp.asarray(tokens))
        losses.append(float(value))
    return losses


def torch_losses(make, params) -> list[float]:
    model = Transformer()
    model.load(params)
    optimizer = make(model)
    losses = []
    for tokens in map(torch.from_numpy, batches()):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(Celo2, celo2.jax.celo2), (Celo2Base, celo2.jax.celo2_base)],
    ids=["celo2", "celo2-base"],
)
def test_transformer_learns_the_same_in_both_frameworks(ours, theirs):
    params = init_lm(jax.random.key(0), CONFIG)
    expected = jax_losses(theirs(1e-3, weight_decay=0.1), params)
    losses = torch_losses(lambda model: ours(model, 1e-3, weight_decay=0.1), params)
    assert expected[-1] < expected[0] - 0.3
    # Rounding grows from step to step; a different rule would be off by much more at once.
    np.testing.assert_allclose(losses[:10], expected[:10], rtol=1e-5)
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
