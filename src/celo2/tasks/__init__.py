"""Things to train: `TASKS` maps a name to how the task is made and how long a small run is."""

from collections.abc import Callable
from functools import partial

from celo2.tasks import convnet, images, lm, text, vit
from celo2.tasks.classify import image_convnet, image_mlp, image_vit
from celo2.tasks.images import ImageBank, ImageSet, Size, sample_batch
from celo2.tasks.lm import language_model
from celo2.tasks.task import Task, TaskSpec, Trainer, TrainState, supervised
from celo2.tasks.text import Corpus

__all__ = [
    "TASKS",
    "Corpus",
    "ImageBank",
    "ImageSet",
    "Task",
    "TaskSpec",
    "TrainState",
    "Trainer",
    "find",
    "image_convnet",
    "image_mlp",
    "image_vit",
    "language_model",
    "sample_batch",
    "supervised",
]


def find(name: str) -> TaskSpec:
    """The table's entry of that name.

    >>> find("digits-mlp").steps
    2000
    """
    if name not in TASKS:
        raise ValueError(f"{name!r} is not a task; there are {', '.join(TASKS)}.")
    return TASKS[name]


def _image_spec(model: Callable, options, name: str, steps: int, size: Size = "8x8") -> TaskSpec:
    def make(*, data=None, batch=64) -> Task:
        return model(images.load(name, data, size), options, batch)

    return TaskSpec(make, steps, batch=64)


def _text_spec(size: str, steps: int, batch: int) -> TaskSpec:
    def make(*, text: str | Corpus = text.EMBEDDED, data=None, batch=batch) -> Task:
        corpus = text if isinstance(text, Corpus) else _load_text(text, data)
        return language_model(corpus, lm.CONFIGS[size], batch)

    return TaskSpec(make, steps, batch)


_load_text = text.load
_mlp_spec = partial(_image_spec, image_mlp)

# Steps: about a minute on two CPU cores with AdamW. A text step is 1,024 to 2,048 tokens.
TASKS: dict[str, TaskSpec] = {
    "digits-mlp": _mlp_spec((32,), "digits", steps=2000),
    "digits-mlp-wide": _mlp_spec((256, 256), "digits", steps=2000),
    "digits-conv": _image_spec(image_convnet, convnet.CONFIGS["tiny"], "digits", steps=1000),
    "vit-tiny": _image_spec(image_vit, vit.CONFIGS["tiny"], "digits", steps=1000),
    **{f"image-mlp-{name}": _mlp_spec((32,), name, steps=2000) for name in images.NAMES},
    "conv-cifar10": _image_spec(
        image_convnet, convnet.CONFIGS["small"], "cifar10", steps=200, size="full"
    ),
    "vit-cifar10": _image_spec(image_vit, vit.CONFIGS["cifar"], "cifar10", steps=60, size="full"),
    "text-tiny": _text_spec("tiny", steps=1000, batch=16),
    "lm-tiny": _text_spec("tiny", steps=1000, batch=16),
    "lm-0.3m": _text_spec("0.3m", steps=600, batch=8),
    "lm-1m": _text_spec("1m", steps=300, batch=8),
    "lm-3m": _text_spec("3m", steps=150, batch=4),
}
