"""The task of classifying a dataset's images with one of the models."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from celo2.tasks import convnet, mlp, vit
from celo2.tasks.augment import crop_and_flip
from celo2.tasks.images import CLASSES, ImageSet, to_signed, to_unit
from celo2.tasks.layers import accuracy, cross_entropy
from celo2.tasks.stream import Stream
from celo2.tasks.task import Task

Area = tuple[float, float]  # smallest and largest part of an image that a crop may take


def classification(
    images: ImageSet,
    init: Callable[[Array], dict],
    logits: Callable[[dict, Array], Array],
    batch: int,
    area: Area | None = None,
) -> Task:
    """Cross-entropy on random batches x [B, H, W, channels] in [0, 1], y [B].

    The dataset's test split is the one for validation. With an `area`, training images are cropped
    and mirrored at random, see `crop_and_flip`.
    """

    def sample(data, key, split):
        x, y = data[split]
        if area is None or split != "train":
            rows = jax.random.randint(key, (batch,), 0, len(y))
            return to_unit(x[rows]), y[rows].astype(jnp.int32)
        rows_key, crop_key = jax.random.split(key)
        rows = jax.random.randint(rows_key, (batch,), 0, len(y))
        return crop_and_flip(to_unit(x[rows]), crop_key, area), y[rows].astype(jnp.int32)

    data = {
        "train": (_with_channels(images.train_x), jnp.asarray(images.train_y)),
        "valid": (_with_channels(images.test_x), jnp.asarray(images.test_y)),
    }
    return Task(init, sample, _loss(logits), data)


def image_mlp(
    images: ImageSet, hidden: Sequence[int] = (32,), batch: int = 64, area: Area | None = None
) -> Task:
    """An MLP on flattened pixels."""
    sizes = (images.train_x[0].size, *hidden, CLASSES)
    return classification(images, lambda key: mlp.init(key, sizes), mlp.logits, batch, area)


def image_convnet(
    images: ImageSet, config: convnet.ConvConfig, batch: int = 64, area: Area | None = None
) -> Task:
    """A residual convolution net with as many input channels as the images have."""
    config = dataclasses.replace(config, channels=_channels(images))
    return classification(
        images,
        lambda key: convnet.init(key, config),
        lambda params, x: convnet.logits(params, config, x),
        batch,
        area,
    )


def image_vit(
    images: ImageSet, config: vit.ViTConfig, batch: int = 64, area: Area | None = None
) -> Task:
    """A vision transformer for the images' side and channels."""
    side = images.train_x.shape[1]
    config = dataclasses.replace(config, side=side, channels=_channels(images))
    return classification(
        images,
        lambda key: vit.init(key, config),
        lambda params, x: vit.logits(params, config, x),
        batch,
        area,
    )


def streamed_vit(images: Stream, config: vit.ViTConfig) -> Task:
    """A vision transformer on batches from the host: x uint8 [B, side, side, channels], y [B].

    Pixels come as bytes, a quarter of what crosses to the device otherwise, and are taken to
    [-1, 1] there.
    """

    def logits(params, x):
        dtype = params["patch_embed"]["kernel"].dtype
        return vit.logits(params, config, to_signed(x).astype(dtype))

    return Task(
        lambda key: vit.init(key, config), lambda batch, key, split: batch, _loss(logits), images
    )


def _loss(logits: Callable[[dict, Array], Array]) -> Callable:
    def loss(params, xy):
        x, y = xy
        scores = logits(params, x)
        value = cross_entropy(scores, y)
        return value, {"loss": value, "accuracy": accuracy(scores, y)}

    return loss


def _channels(images: ImageSet) -> int:
    return 1 if images.train_x.ndim == 3 else images.train_x.shape[-1]


def _with_channels(x) -> Array:
    return jnp.asarray(x if x.ndim == 4 else x[..., None])
