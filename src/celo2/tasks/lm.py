"""A decoder-only language model, and the task of training it on a text."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from celo2.tasks.layers import cross_entropy, normal, rms_norm
from celo2.tasks.pipeline import stream
from celo2.tasks.task import Task
from celo2.tasks.text import Corpus, windows
from celo2.tasks.tokens import TokenFolder
from celo2.tasks.transformer import apply_blocks, check_heads, init_blocks

VOCAB_STEP = 128  # a vocabulary is rounded up to a multiple of it
GPT2_VOCAB = 50_304  # the 50,257 tokens of GPT-2, rounded up
GATHERED = ("embed.table",)


@dataclass(frozen=True)
class LMConfig:
    """A size of the language model; the paper's letters are D, L, H, T."""

    width: int
    layers: int
    head_width: int
    length: int
    vocab: int = 256
    remat: bool = False  # compute a block's activations again rather than keep them

    def __post_init__(self):
        check_heads(self.width, self.head_width)


CONFIGS = {
    "tiny": LMConfig(64, 2, 32, 64),
    "0.3m": LMConfig(64, 6, 32, 128),
    "0.8m": LMConfig(128, 4, 64, 128),
    "1m": LMConfig(128, 5, 64, 128),
    "3m": LMConfig(192, 6, 64, 256),
    # The paper's three.
    "lm30m": LMConfig(384, 6, 128, 512, GPT2_VOCAB),
    "gpt2": LMConfig(768, 12, 128, 1024, GPT2_VOCAB),
    "gpt3xl": LMConfig(2048, 24, 128, 2048, GPT2_VOCAB),
}


def init(key: Array, config: LMConfig) -> dict:
    """`embed`, `blocks` and an untied `lm_head`; both tables normal with σ = 1/√D."""
    embed_key, blocks_key, head_key = jax.random.split(key, 3)
    shape, scale = (config.vocab, config.width), 1 / math.sqrt(config.width)
    return {
        "embed": {"table": normal(embed_key, shape, scale)},
        "blocks": init_blocks(blocks_key, config.width, config.layers),
        "lm_head": {"kernel": normal(head_key, shape[::-1], scale)},
    }


def logits(params: dict, config: LMConfig, tokens: Array) -> Array:
    """[B, T, vocab]: at each place, the next token's logits."""
    x = params["embed"]["table"][tokens]  # [B, T, D]
    x = x.astype(params["lm_head"]["kernel"].dtype)
    x = apply_blocks(params["blocks"], x, config.head_width, causal=True, remat=config.remat)
    return rms_norm(x) @ params["lm_head"]["kernel"]


def language_model(corpus: Corpus, config: LMConfig, batch: int) -> Task:
    """Next-token prediction on random windows of the corpus; the loss is in nats per token.

    A byte corpus needs fewer tokens than the config may have: the vocabulary is the corpus's.
    """
    config = dataclasses.replace(config, vocab=corpus.vocab)

    def sample(data, key, split):
        return windows(data[split], key, batch, config.length + 1)

    data = {"train": jnp.asarray(corpus.train), "valid": jnp.asarray(corpus.valid)}
    return Task(partial(init, config=config), sample, partial(_loss, config), data, GATHERED)


def streamed_language_model(folder: TokenFolder, config: LMConfig, batch: int) -> Task:
    """The same on a token folder, each of whose windows comes once per epoch.

    The vocabulary is the folder's, rounded up to a multiple of 128.
    """
    vocab = -(-folder.vocab // VOCAB_STEP) * VOCAB_STEP
    if vocab > config.vocab:
        raise ValueError(
            f"{folder.path} has a vocabulary of {folder.vocab:,} ({folder.tokenizer}), and this "
            f"model has {config.vocab:,}: take a larger one, or make the folder with --tokenizer "
            "bytes."
        )
    config = dataclasses.replace(config, vocab=vocab)
    data = stream(folder, config.length, batch)
    return Task(
        partial(init, config=config),
        lambda data, key, split: data,
        partial(_loss, config),
        data,
        GATHERED,
    )


def _loss(config: LMConfig, params: dict, tokens: Array) -> tuple[Array, dict[str, Array]]:
    value = cross_entropy(logits(params, config, tokens[:, :-1]), tokens[:, 1:])
    return value, {"loss": value}
