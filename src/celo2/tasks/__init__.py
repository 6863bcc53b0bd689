"""Things to train: `TASKS` maps a name to how the task is made and how long a small run is."""

import dataclasses
from collections.abc import Callable
from functools import partial

from celo2.tasks import convnet, imagefolder, images, imagestream, lm, ppo, text, tokens, vit
from celo2.tasks.augment import SMALL_AREA
from celo2.tasks.classify import Area, image_convnet, image_mlp, image_vit, streamed_vit
from celo2.tasks.images import ImageBank, ImageSet, Size, sample_batch
from celo2.tasks.lm import language_model, streamed_language_model
from celo2.tasks.ppo import PPOConfig
from celo2.tasks.rollout import GAMES
from celo2.tasks.task import Task, TaskSpec, Trainer, TrainState, over_seeds, supervised
from celo2.tasks.text import Corpus

__all__ = [
    "TASKS",
    "Corpus",
    "ImageBank",
    "ImageSet",
    "PPOConfig",
    "Task",
    "TaskSpec",
    "TrainState",
    "Trainer",
    "find",
    "image_convnet",
    "image_mlp",
    "image_vit",
    "language_model",
    "over_seeds",
    "sample_batch",
    "streamed_language_model",
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


def _image_spec(
    model: Callable, options, name: str, steps: int, size: Size = "8x8", area: Area | None = None
) -> TaskSpec:
    """With an `area`, training images are cropped and mirrored at random."""

    def make(*, data=None, batch=64) -> Task:
        return model(images.load(name, data, size), options, batch, area)

    def blank(*, batch=64) -> Task:
        return model(images.blank(name, size), options, batch, area)

    return TaskSpec(make, steps, batch=64, blank=blank)


def _imagenet_spec(steps: int, batch: int) -> TaskSpec:
    config = vit.CONFIGS["b16"]

    def make(*, data=None, batch=batch, remat=False) -> Task:
        files = imagefolder.find(data)
        stream = imagestream.stream(files, batch, config.side)
        model = dataclasses.replace(config, classes=files.classes, remat=remat)
        return streamed_vit(stream, model)

    def blank(*, batch=batch, remat=False) -> Task:
        model = dataclasses.replace(config, remat=remat)
        return streamed_vit(imagestream.blank(batch, config.side), model)

    return TaskSpec(make, steps, batch, blank=blank)


def _text_spec(size: str, steps: int, batch: int) -> TaskSpec:
    config = lm.CONFIGS[size]
    default = text.EMBEDDED if config.vocab == text.BYTES else None

    def make(*, text: str | Corpus | None = default, data=None, batch=batch, remat=False) -> Task:
        model = dataclasses.replace(config, remat=remat)
        if text is None:
            raise ValueError(f"{size} has {config.vocab:,} tokens: name the `text` to train on.")
        if folder := tokens.find_folder(text, data):
            return streamed_language_model(tokens.read_folder(folder), model, batch)
        corpus = text if isinstance(text, Corpus) else _load_text(text, data)
        return language_model(corpus, model, batch)

    def blank(*, batch=batch, remat=False) -> Task:
        model = dataclasses.replace(config, remat=remat)
        return language_model(_blank_text(config.vocab, config.length + 1), model, batch)

    return TaskSpec(make, steps, batch, blank=blank)


def _minatar_spec(game: str, steps: int) -> TaskSpec:
    config = PPOConfig(game)

    def make(*, data=None, batch=config.environments, **options) -> PPOConfig:
        return PPOConfig(game, environments=batch, **options)

    return TaskSpec(
        make,
        steps,
        config.environments,
        metric="return",
        updates_per_step=config.updates_per_step,
        higher_is_better=True,
        train=ppo.ppo,
    )


# Under other names, since `text` is an argument above.
_load_text, _blank_text = text.load, text.blank
_mlp_spec = partial(_image_spec, image_mlp)
_full_spec = partial(_image_spec, size="full")
# Names, models and steps; each with and without augmentation, which is for longer runs: an epoch
# is 781 steps, and where images hardly come twice it only makes the task harder.
CIFAR10 = (
    ("vit-tiny", (image_vit, vit.CONFIGS["small"]), 500),
    ("vit", (image_vit, vit.CONFIGS["cifar"]), 60),
    ("conv", (image_convnet, convnet.CONFIGS["small"]), 200),
    ("resnet", (image_convnet, convnet.CONFIGS["resnet"]), 30),
)

# Steps: a minute on two CPU cores with AdamW, or less. A text step is 1,024 to 2,048 tokens, a
# MinAtar step 8,192 actions (a batch is its environments); the paper's run is 1,220 steps.
TASKS: dict[str, TaskSpec] = {
    "digits-mlp": _mlp_spec((32,), "digits", steps=2000),
    "digits-mlp-wide": _mlp_spec((256, 256), "digits", steps=2000),
    "digits-conv": _image_spec(image_convnet, convnet.CONFIGS["tiny"], "digits", steps=1000),
    "vit-tiny": _image_spec(image_vit, vit.CONFIGS["tiny"], "digits", steps=1000),
    **{f"image-mlp-{name}": _mlp_spec((32,), name, steps=2000) for name in images.NAMES},
    **{
        f"image-mlp-28-{name}": _full_spec(image_mlp, (128, 128), name, steps=2000)
        for name in ("mnist", "fashion_mnist")
    },
    "vit-tiny-fashion": _full_spec(image_vit, vit.CONFIGS["small"], "fashion_mnist", steps=700),
    **{
        f"{model}-cifar10{ending}": _full_spec(*options, "cifar10", steps=steps, area=area)
        for model, options, steps in CIFAR10
        for ending, area in (("", None), ("-augmented", SMALL_AREA))
    },
    "text-tiny": _text_spec("tiny", steps=1000, batch=16),
    "lm-tiny": _text_spec("tiny", steps=1000, batch=16),
    "lm-0.3m": _text_spec("0.3m", steps=600, batch=8),
    "lm-0.8m": _text_spec("0.8m", steps=400, batch=8),
    "lm-1m": _text_spec("1m", steps=300, batch=8),
    "lm-3m": _text_spec("3m", steps=150, batch=4),
    # The paper's, with its number of tokens: 20 for each parameter, 10 for the largest.
    "lm30m": _text_spec("lm30m", steps=4_578, batch=256),
    "gpt2": _text_spec("gpt2", steps=4_730, batch=512),
    "gpt3xl": _text_spec("gpt3xl", steps=12_400, batch=512),
    "vit-b16-imagenet": _imagenet_spec(steps=50_000, batch=512),
    **{f"minatar-{game}": _minatar_spec(game, steps=200) for game in GAMES},
}
