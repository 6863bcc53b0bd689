"""A small convolution net whose gradient is fast inside a compiled loop, also on a CPU."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from celo2.tasks import Task, images
from celo2.tasks.classify import classification
from celo2.tasks.layers import along_last_axis, dense, init_dense, truncated_normal

WIDTHS = (16, 32, 32)
STRIDES = (1, 2, 2)


def digits_convnet(batch: int = 64) -> Task:
    """Three 3×3 convolutions and a linear head on the embedded digits."""
    return classification(images.load("digits"), init, logits, batch)


def init(key: Array, widths: Sequence[int] = WIDTHS) -> dict:
    """Kernels (3, 3, in, out) and biases, `conv_i` and `head`, for 2×2 last pixels."""
    head_key, *keys = jax.random.split(key, 1 + len(widths))
    shapes = zip((1, *widths), widths, strict=False)
    layers = {
        f"conv_{i}": {
            "kernel": truncated_normal(k, (3, 3, *shape), 2**0.5),
            "bias": jnp.zeros(shape[1]),
        }
        for i, (k, shape) in enumerate(zip(keys, shapes, strict=True))
    }
    return layers | {"head": init_dense(head_key, 2 * 2 * widths[-1], images.CLASSES)}


def logits(params: dict, x: Array, strides: Sequence[int] = STRIDES) -> Array:
    """[B, classes] from images [B, 8, 8, 1]."""
    for i, stride in enumerate(strides):
        layer = params[f"conv_{i}"]
        x = convolve(layer["kernel"], x, stride)
        x = jax.nn.relu(x + along_last_axis(layer["bias"], x))
    return dense(params["head"], x.reshape(len(x), -1))


def convolve(kernel: Array, x: Array, stride: int) -> Array:
    """A convolution with zeros around the image, as one matrix product over patches.

    XLA's own, differentiated inside a loop on a CPU, takes 17 times as long.
    """
    height, width = (-(-side // stride) for side in x.shape[1:3])
    x = jnp.pad(x, ((0, 0), *((_padding(side, stride)) for side in x.shape[1:3]), (0, 0)))
    taps = [
        x[:, i : i + stride * height : stride, j : j + stride * width : stride][:, :height, :width]
        for i in range(3)
        for j in range(3)
    ]
    patches = jnp.concatenate(taps, axis=-1)  # [B, H, W, 9·in]
    flat = patches.reshape(-1, patches.shape[-1]) @ kernel.reshape(-1, kernel.shape[-1])
    return flat.reshape(*patches.shape[:-1], kernel.shape[-1])


def _padding(side: int, stride: int) -> tuple[int, int]:
    """Zeros before and after, as the padding "SAME" has them."""
    total = max((-(-side // stride) - 1) * stride + 3 - side, 0)
    return total // 2, total - total // 2
