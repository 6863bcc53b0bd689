"""The task of classifying a dataset's images with one of the models."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from celo2.tasks import convnet, mlp, vit
from celo2.tasks.images import CLASSES, ImageSet, to_unit
from celo2.tasks.layers import accuracy, cross_entropy
from celo2.tasks.task import Task


def classification(
    images: ImageSet,
    init: Callable[[Array], dict],
    logits: Callable[[dict, Array], Array],
    batch: int,
) -> Task:
    """Cross-entropy on random batches x [B, H, W, channels] in [0, 1], y [B].

    The dataset's test split is the one for validation.
    """

    def sample(data, key, split):
        x, y = data[split]
        rows = jax.random.randint(key, (batch,), 0, len(y))
        return to_unit(x[rows]), y[rows].astype(jnp.int32)

    def loss(params, xy):
        x, y = xy
        scores = logits(params, x)
        value = cross_entropy(scores, y)
        return value, {"loss": value, "accuracy": accuracy(scores, y)}

    data = {
        "train": (_with_channels(images.train_x), jnp.asarray(images.train_y)),
        "valid": (_with_channels(images.test_x), jnp.asarray(images.test_y)),
    }
    return Task(init, sample, loss, data)


def image_mlp(images: ImageSet, hidden: Sequence[int] = (32,), batch: int = 64) -> Task:
    """An MLP on flattened pixels."""
    sizes = (images.train_x[0].size, *hidden, CLASSES)
    return classification(images, lambda key: mlp.init(key, sizes), mlp.logits, batch)


def image_convnet(images: ImageSet, config: convnet.ConvConfig, batch: int = 64) -> Task:
    """A residual convolution net with as many input channels as the images have."""
    config = dataclasses.replace(config, channels=_channels(images))
    return classification(
        images,
        lambda key: convnet.init(key, config),
        lambda params, x: convnet.logits(params, config, x),
        batch,
    )


def image_vit(images: ImageSet, config: vit.ViTConfig, batch: int = 64) -> Task:
    """A vision transformer for the images' side and channels."""
    side = images.train_x.shape[1]
    config = dataclasses.replace(config, side=side, channels=_channels(images))
    return classification(
        images,
        lambda key: vit.init(key, config),
        lambda params, x: vit.logits(params, config, x),
        batch,
    )


def _channels(images: ImageSet) -> int:
    return 1 if images.train_x.ndim == 3 else images.train_x.shape[-1]


def _with_channels(x) -> Array:
    return jnp.asarray(x if x.ndim == 4 else x[..., None])
