"""Pre-norm transformer blocks, shared by the language model and the vision transformer.

Norms have no learned scale and layers no bias, so that every parameter of a block is a matrix.
"""

import jax
import jax.numpy as jnp
from jax import Array

from celo2.tasks.layers import rms_norm, spread_examples, xavier_uniform

EXPANSION = 4  # F / D
LONGEST_WAVE = 10_000.0  # of the rotary position code, over 2π tokens


def check_heads(width: int, head_width: int) -> None:
    """Raises a ValueError unless heads of an even width fill the model's width."""
    if width % head_width or head_width % 2:
        raise ValueError(
            f"head_width={head_width} must be even and divide width={width} without remainder."
        )


def init_block(key: Array, width: int) -> dict:
    """Xavier-uniform kernels: q, k, v, o are (D, D) with heads side by side, up (D, 4D), down."""
    keys = jax.random.split(key, 6)
    inner = EXPANSION * width
    attention = {
        name: {"kernel": xavier_uniform(k, (width, width))}
        for name, k in zip("qkvo", keys, strict=False)
    }
    mlp = {
        "up": {"kernel": xavier_uniform(keys[4], (width, inner))},
        "down": {"kernel": xavier_uniform(keys[5], (inner, width))},
    }
    return {"attention": attention, "mlp": mlp}


def init_blocks(key: Array, width: int, layers: int) -> dict:
    """`block_0` … `block_{layers-1}`."""
    return {f"block_{i}": init_block(k, width) for i, k in enumerate(jax.random.split(key, layers))}


def apply_blocks(
    params: dict, x: Array, head_width: int, *, causal: bool, remat: bool = False
) -> Array:
    """The residual stream [B, T, D] after all blocks.

    Causal attention sees the past only and gets its sense of order from rotary positions;
    otherwise positions must be in `x`. With `remat` the backward pass keeps only the stream
    between blocks and computes the rest again.
    """

    def apply_block(block: dict, x: Array) -> Array:
        x = x + attention(block["attention"], rms_norm(x), head_width, causal=causal)
        return x + mlp(block["mlp"], rms_norm(x))

    if remat:
        apply_block = jax.checkpoint(apply_block)
    x = spread_examples(x)
    for i in range(len(params)):
        x = spread_examples(apply_block(params[f"block_{i}"], x))
    return x


def attention(params: dict, x: Array, head_width: int, *, causal: bool) -> Array:
    """Multi-head attention with normalised queries and keys."""
    batch, length, width = x.shape
    heads = (batch, length, width // head_width, head_width)
    q, k, v = ((x @ params[name]["kernel"]).reshape(heads) for name in "qkv")  # [B, T, N, H]
    q, k = rms_norm(q), rms_norm(k)
    if causal:
        q, k = rotate(q), rotate(k)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=causal)  # [B, T, N, H]
    return mixed.reshape(x.shape) @ params["o"]["kernel"]


def rotate(x: Array) -> Array:
    """Rotary positions: turns each pair of channels of [B, T, N, H] by an angle growing with T."""
    half = x.shape[-1] // 2
    # Angles in float32: bfloat16 has no number for most positions above 256.
    waves = LONGEST_WAVE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), waves)[None, :, None, :]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def mlp(params: dict, x: Array) -> Array:
    """Two layers with a GELU between them."""
    return jax.nn.gelu(x @ params["up"]["kernel"]) @ params["down"]["kernel"]
