"""A small residual convolution net."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from celo2.tasks.layers import along_last_axis, dense, init_dense, rms_norm, truncated_normal


@dataclass(frozen=True)
class ConvConfig:
    """Stages of residual blocks; each stage after the first halves the image."""

    channels: int = 1
    widths: tuple[int, ...] = (16, 32)
    blocks: int = 1  # per stage
    classes: int = 10


CONFIGS = {
    "tiny": ConvConfig(),
    "small": ConvConfig(widths=(32, 64, 128)),
    "resnet": ConvConfig(widths=(64, 128, 256, 512), blocks=2),
}


def init(key: Array, config: ConvConfig) -> dict:
    """3×3 kernels (3, 3, in, out), `stem`, `stage_i` and `head`."""
    stem_key, head_key, *keys = jax.random.split(key, 2 + len(config.widths))
    params: dict = {"stem": _init_conv(stem_key, config.channels, config.widths[0])}
    width = config.widths[0]
    for i, (stage_key, out) in enumerate(zip(keys, config.widths, strict=True)):
        down_key, *block_keys = jax.random.split(stage_key, 1 + config.blocks)
        stage = {f"block_{j}": _init_block(k, out) for j, k in enumerate(block_keys)}
        if i > 0:
            stage["down"] = _init_conv(down_key, width, out)
        params[f"stage_{i}"] = stage
        width = out
    params["norm"] = {"scale": jnp.ones(width)}
    return params | {"head": init_dense(head_key, width, config.classes)}


def logits(params: dict, config: ConvConfig, x: Array) -> Array:
    """[B, classes] from images [B, H, W, channels]."""
    x = _conv(params["stem"], x)
    for i in range(len(config.widths)):
        stage = params[f"stage_{i}"]
        if "down" in stage:
            x = _conv(stage["down"], x, stride=2)
        for j in range(config.blocks):
            x = _block(stage[f"block_{j}"], x)
    x = jnp.mean(jax.nn.relu(_norm(params["norm"], x)), axis=(1, 2))
    return dense(params["head"], x)


def _init_conv(key: Array, fan_in: int, fan_out: int) -> dict:
    # √2: a ReLU passes half of the second moment.
    return {"kernel": truncated_normal(key, (3, 3, fan_in, fan_out), 2**0.5)}


def _init_block(key: Array, width: int) -> dict:
    keys = jax.random.split(key)
    return {
        f"{part}_{i}": value
        for i, k in enumerate(keys)
        for part, value in (
            ("norm", {"scale": jnp.ones(width)}),
            ("conv", _init_conv(k, width, width)),
        )
    }


def _block(params: dict, x: Array) -> Array:
    y = x
    for i in range(2):
        y = _conv(params[f"conv_{i}"], jax.nn.relu(_norm(params[f"norm_{i}"], y)))
    return x + y


def _conv(params: dict, x: Array, stride: int = 1) -> Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, params["kernel"], (stride, stride), "SAME", dimension_numbers=numbers
    )


def _norm(params: dict, x: Array) -> Array:
    # Over the whole image: no running statistics, so a batch's images stay independent.
    return rms_norm(x, (1, 2, 3)) * along_last_axis(params["scale"], x)
