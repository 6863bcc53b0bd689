"""A vision transformer classifier."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from celo2.tasks.layers import dense, init_dense, normal, rms_norm
from celo2.tasks.transformer import apply_blocks, check_heads, init_blocks


@dataclass(frozen=True)
class ViTConfig:
    """A size of the vision transformer, for square images."""

    side: int = 8
    channels: int = 1
    patch: int = 2
    width: int = 64
    layers: int = 2
    head_width: int = 32
    classes: int = 10
    remat: bool = False  # compute a block's activations again rather than keep them

    def __post_init__(self):
        check_heads(self.width, self.head_width)
        if self.side % self.patch:
            raise ValueError(f"patch={self.patch} must divide side={self.side} without remainder.")

    @property
    def patches(self) -> int:
        return (self.side // self.patch) ** 2


CONFIGS = {
    "tiny": ViTConfig(),
    "small": ViTConfig(side=32, channels=3, patch=4, width=64, layers=4),
    "cifar": ViTConfig(side=32, channels=3, patch=4, width=192, layers=6, head_width=64),
    "b16": ViTConfig(256, 3, 16, width=768, layers=12, head_width=64, classes=1000),
}


def init(key: Array, config: ViTConfig) -> dict:
    """`patch_embed`, a learned `position` table, `blocks` and `head`."""
    embed_key, position_key, blocks_key, head_key = jax.random.split(key, 4)
    pixels = config.patch**2 * config.channels
    position = normal(position_key, (config.patches, config.width), 0.02)
    return {
        "patch_embed": init_dense(embed_key, pixels, config.width),
        "position": {"table": position},
        "blocks": init_blocks(blocks_key, config.width, config.layers),
        "head": init_dense(head_key, config.width, config.classes),
    }


def logits(params: dict, config: ViTConfig, images: Array) -> Array:
    """[B, classes] from images [B, side, side, channels], by the mean of the last tokens."""
    x = dense(params["patch_embed"], split_patches(images, config.patch))
    x = x + params["position"]["table"][None]
    x = apply_blocks(params["blocks"], x, config.head_width, causal=False, remat=config.remat)
    return dense(params["head"], jnp.mean(rms_norm(x), axis=1))


def split_patches(images: Array, patch: int) -> Array:
    """[B, patches, patch · patch · channels], patches in reading order."""
    batch, height, width, channels = images.shape
    rows, columns = height // patch, width // patch
    x = images.reshape(batch, rows, patch, columns, patch, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, -1)
