"""Random crops and flips of training images, drawn alike on the host and on the device."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

PAPER_AREA = (0.05, 1.0)
# 5 % of a 32×32 image would be 7×7 pixels, which rarely show what the label says.
SMALL_AREA = (0.25, 1.0)
ASPECT = (3 / 4, 4 / 3)  # width over height
DRAWS = 5  # uniform numbers that make one crop and its flip


class Crop(NamedTuple):
    """A part of an image in fractions of its sides, and whether it is mirrored."""

    left: Any
    top: Any
    width: Any
    height: Any
    flip: Any


def crop_from(draws: Any, area: tuple[float, float], xp: Any) -> Crop:
    """The crop that `DRAWS` uniform numbers, first axis, mean; `xp` is numpy or jax.numpy.

    The area is uniform and the aspect ratio log-uniform; a side longer than the image is cut to
    it. The place is uniform among those inside, and half of all crops are mirrored.
    """
    low, high = area
    share = low + (high - low) * draws[0]
    log_low, log_high = map(math.log, ASPECT)
    root = xp.exp(0.5 * (log_low + (log_high - log_low) * draws[1]))  # of the aspect ratio
    width = xp.minimum(xp.sqrt(share) * root, 1.0)
    height = xp.minimum(xp.sqrt(share) / root, 1.0)
    left, top = draws[2] * (1.0 - width), draws[3] * (1.0 - height)
    return Crop(left, top, width, height, draws[4] < 0.5)


def crop_and_flip(images: Array, key: Array, area: tuple[float, float]) -> Array:
    """Random parts of float images [B, H, W, channels], each resized to the whole, half mirrored.

    Two small matrix products an image: cheap beside any model.
    """
    crops = crop_from(jax.random.uniform(key, (DRAWS, len(images))), area, jnp)
    return jax.vmap(_resize)(images, crops)


def _resize(image: Array, crop: Crop) -> Array:
    height, width = image.shape[:2]
    scale = jnp.stack([1.0 / crop.height, 1.0 / crop.width])
    start = jnp.stack([crop.top * height, crop.left * width])
    # Crops are never larger than the image, so nothing needs smoothing before it is resized.
    resized = jax.image.scale_and_translate(
        image, image.shape, (0, 1), scale, -start * scale, "linear", antialias=False
    )
    return jnp.where(crop.flip, resized[:, ::-1], resized)
