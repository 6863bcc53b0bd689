"""The kinds of inner problems: from a config to tasks, and the checksums of their data."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from celo2.metatrain.config import FamilyConfig, MetaConfig, of_family
from celo2.runs.checkpoint import digest_arrays, name_arrays
from celo2.runs.fields import import_function
from celo2.tasks import (
    ImageBank,
    ImageSet,
    LMConfig,
    Task,
    ViTConfig,
    image_bank,
    language_model,
    load_images,
    load_text,
    sample_batch,
    select_images,
)
from celo2.tasks.images import CLASSES, FULL_SHAPES, Size
from celo2.tasks.networks import (
    cross_entropy,
    init_mlp,
    init_patch_convnet,
    init_vit,
    mlp_logits,
    patch_convnet_logits,
    vit_logits,
)
from celo2.tasks.text import PYTHON_DOCS, reduce_vocabulary

EVERY_MATRIX: Mapping[str, str] = {"head.*kernel": "rule"}


class Family(NamedTuple):
    """The tasks problems are drawn from, distinguished by an index."""

    names: tuple[str, ...]
    init: Callable[[Array], Any]  # key -> params
    sample: Callable[[Any, Array, Array], Any]  # data, key, index -> batch
    loss: Callable[[Any, Any], Array]  # params, batch -> scalar
    data: Any
    overrides: Mapping[str, str] | None = None  # of who updates what
    config: MetaConfig = MetaConfig()  # the run's, with the family's own settings
    weight: float = 1.0  # of its gradient among the families'
    classes: int = CLASSES

    @property
    def highest_loss(self) -> float:
        """The limit of inner losses: the config's, else 1.5 times that of a uniform guess."""
        limit = self.config.loss_limit
        return 1.5 * math.log(self.classes) if limit is None else limit

    @property
    def problems(self) -> int:
        return self.config.problems * len(self.names)


Made = tuple[Family, dict[str, str]]  # and the checksums of its data


class Source(NamedTuple):
    """Families of tasks and the SHA-256 of each one's data."""

    families: tuple[Family, ...]
    checksums: dict[str, str]


def load_families(
    config: MetaConfig, data: str | PathLike | None = None, task: Task | None = None
) -> Source:
    """The config's families, its task, a task given as such, or the paper's image MLPs.

    A task is identified by its data alone: its functions are not part of the checksum.
    """
    if task is not None:
        if config.task is not None or config.families:
            raise ValueError("the config names what to train on, and a task was given: give one.")
        made = [_from_task(task, "task", config)]
    elif config.task is not None:
        made = [_from_task(import_task(config.task), config.task, config)]
    elif not config.families:
        made = [_image_mlp(config, data)]
    else:
        made = [_load(config, family, data) for family in config.families]
    if config.datasets is not None and not any(isinstance(f.data, ImageBank) for f, _ in made):
        raise ValueError(f"datasets={config.datasets}, but no family trains on images.")
    return Source(
        tuple(family for family, _ in made),
        {name: value for _, checksums in made for name, value in checksums.items()},
    )


def count_problems(config: MetaConfig, data: str | PathLike | None = None) -> list[int]:
    """How many problems each family has, without touching a device."""
    if not config.families:
        return [config.problems * (len(image_sets(config, data)) if config.task is None else 1)]
    counts = []
    for family in config.families:
        known = FAMILIES.get(family.name)
        own = of_family(config, family, known and known.defaults)
        sets = len(image_sets(own, data, known.images)) if known and known.images else 1
        counts.append(own.problems * sets)
    return counts


def import_task(address: str) -> Task:
    """What the function at `module:function` returns, which must be a Task."""
    task = import_function(address, "task", "own_task:make")()
    if not isinstance(task, Task):
        raise ValueError(f"task={address!r} returned a {type(task).__name__}, not a Task.")
    return task


class Known(NamedTuple):
    """A family of the table: how it is made, and the settings that suit it."""

    make: Callable[[MetaConfig, Any], Made]
    defaults: dict[str, Any]
    images: Size | None  # of the image sets it trains on


def _load(config: MetaConfig, family: FamilyConfig, data) -> Made:
    known = FAMILIES.get(family.name)
    own = of_family(config, family, known and known.defaults)
    if known:
        made, checksums = known.make(own, data)
    elif ":" in family.name:
        made, checksums = _from_task(import_task(family.name), family.name, own)
    else:
        raise ValueError(
            f"{family.name!r} is not a family; there are {', '.join(FAMILIES)}, and "
            "module:function for a task of your own."
        )
    names = tuple(f"{family.name}/{name}" for name in made.names)
    return made._replace(names=names, weight=family.weight), checksums


def _from_task(task: Task, name: str, config: MetaConfig) -> Made:
    """A family of one task, with the default routes of `celo2`."""
    arrays = name_arrays(jax.tree.map(np.asarray, task.data))
    family = Family(
        names=(name,),
        init=task.init,
        sample=lambda data, key, index: task.sample(data, key, "train"),
        loss=lambda params, batch: task.loss(params, batch)[0],
        data=task.data,
        config=config,
    )
    return family, {name: digest_arrays(arrays)}


def image_family(
    sets: Sequence[ImageSet],
    config: MetaConfig,
    init: Callable[[Array], dict] = init_mlp,
    logits: Callable[[dict, Array], Array] = mlp_logits,
    overrides: Mapping[str, str] | None = EVERY_MATRIX,
) -> Family:
    """A classifier on several image sets, one index each: the paper's MLPs 64–32–10 by default."""

    def loss(params, xy) -> Array:
        x, y = xy
        return cross_entropy(logits(params, x), y)

    return Family(
        names=tuple(s.name for s in sets),
        init=init,
        sample=lambda data, key, index: sample_batch(data, key, index, config.batch),
        loss=loss,
        data=image_bank(sets),
        overrides=overrides,
        config=config,
    )


def image_sets(config: MetaConfig, data, size: Size = "8x8") -> tuple[ImageSet, ...]:
    """The config's image sets; in full size only grey ones, so that all have one shape."""
    if size == "8x8":
        return select_images(config.datasets, data)
    names = config.datasets or [images.name for images in select_images(None, data)]
    grey = [name for name in names if len(FULL_SHAPES.get(name, ())) == 2]
    if not grey:
        raise ValueError(
            f"no grey images among {', '.join(names)}: pixel-mlp trains on mnist, fashion_mnist "
            "or digits."
        )
    return tuple(load_images(name, data, size) for name in grey)


def _image_mlp(config: MetaConfig, data, size: Size = "8x8", **options) -> Made:
    sets = image_sets(config, data, size)
    sides = [images.train_x.shape[1] for images in sets]
    names = [s.name if n == 8 else f"{s.name}-{n}x{n}" for s, n in zip(sets, sides, strict=True)]
    checksums = {name: images.checksum() for name, images in zip(names, sets, strict=True)}
    return image_family(sets, config, **options), checksums


DEEP = (64, 48, 24, 24, CLASSES)
VIT = ViTConfig(patch=2, width=16, layers=1, head_width=8)
DEEP_VIT = ViTConfig(patch=2, width=32, layers=2, head_width=16)
CONV = (8, 16)
LM = LMConfig(width=16, layers=1, head_width=8, length=16, vocab=64)
DEEP_LM = LMConfig(width=32, layers=2, head_width=16, length=32, vocab=64)


_deep_mlp = partial(_image_mlp, init=partial(init_mlp, sizes=DEEP), overrides=None)


def _pixel_mlp(config: MetaConfig, data) -> Made:
    """An MLP on images of full size, most of whose pixels carry little information."""
    pixels = image_sets(config, data, "full")[0].train_x[0].size
    init = partial(init_mlp, sizes=(pixels, 32, 32, CLASSES))
    return _image_mlp(config, data, "full", init=init, overrides=None)


def _vit(model: ViTConfig, config: MetaConfig, data) -> Made:
    def logits(params, x):
        return vit_logits(params, model, x.reshape(-1, 8, 8, 1))

    return _image_mlp(
        config, data, init=partial(init_vit, config=model), logits=logits, overrides=None
    )


def _convnet(config: MetaConfig, data) -> Made:
    def logits(params, x):
        return patch_convnet_logits(params, x.reshape(-1, 8, 8, 1), strides=(2, 2))

    init = partial(init_patch_convnet, widths=CONV)
    return _image_mlp(config, data, init=init, logits=logits, overrides=None)


def _transformer(model: LMConfig, config: MetaConfig, data) -> Made:
    """A language model on the embedded text; other texts are reserved for evaluation."""
    corpus = reduce_vocabulary(load_text(PYTHON_DOCS, data), model.vocab)
    task = language_model(corpus, model, config.batch)
    family, checksums = _from_task(task, PYTHON_DOCS, config)
    return family._replace(classes=model.vocab), checksums


# Rates around the best of 300 steps with warm-up and cosine decay.
FAMILIES: dict[str, Known] = {
    "image-mlp": Known(_image_mlp, {"inner_rates": (4e-3, 2.5e-2)}, "8x8"),
    "deep-mlp": Known(_deep_mlp, {"inner_rates": (2.5e-3, 1.6e-2)}, "8x8"),
    "pixel-mlp": Known(_pixel_mlp, {"inner_rates": (3e-4, 2e-3)}, "full"),
    "vit": Known(partial(_vit, VIT), {"batch": 32, "inner_rates": (2e-3, 1e-2)}, "8x8"),
    "deep-vit": Known(partial(_vit, DEEP_VIT), {"batch": 32, "inner_rates": (2e-3, 1e-2)}, "8x8"),
    "convnet": Known(_convnet, {"batch": 32, "inner_rates": (2.5e-3, 1.6e-2)}, "8x8"),
    "transformer": Known(
        partial(_transformer, LM), {"batch": 16, "inner_rates": (4e-3, 2e-2)}, None
    ),
    "deep-transformer": Known(
        partial(_transformer, DEEP_LM), {"batch": 8, "inner_rates": (4e-3, 2e-2)}, None
    ),
}
