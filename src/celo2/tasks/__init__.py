"""The tasks: `TASKS` maps a name to how the task is made and how long a small run of it is."""

import dataclasses
from collections.abc import Callable
from functools import partial

from celo2.tasks.images import (
    IMAGE_SETS,
    SMALL_AREA,
    Area,
    ImageBank,
    ImageSet,
    Size,
    blank_images,
    classification,
    image_bank,
    image_convnet,
    image_mlp,
    image_vit,
    load_images,
    sample_batch,
    select_images,
)
from celo2.tasks.networks import (
    CONVNETS,
    LANGUAGE_MODELS,
    VISION_TRANSFORMERS,
    ConvConfig,
    LMConfig,
    ViTConfig,
)
from celo2.tasks.ppo import GAMES, PPOConfig, ppo_trainer
from celo2.tasks.task import (
    Part,
    Split,
    Stream,
    Task,
    TaskSpec,
    Trainer,
    TrainState,
    over_seeds,
    supervised,
)
from celo2.tasks.text import (
    BYTES,
    PYTHON_DOCS,
    Corpus,
    blank_text,
    language_model,
    load_text,
)
from celo2.tasks.tokens import read_token_folder, streamed_language_model, token_folder_path

__all__ = [
    "TASKS",
    "ConvConfig",
    "Corpus",
    "ImageBank",
    "ImageSet",
    "LMConfig",
    "PPOConfig",
    "Part",
    "Split",
    "Stream",
    "Task",
    "TaskSpec",
    "TrainState",
    "Trainer",
    "ViTConfig",
    "classification",
    "image_bank",
    "image_convnet",
    "image_mlp",
    "image_vit",
    "language_model",
    "load_images",
    "load_text",
    "over_seeds",
    "sample_batch",
    "select_images",
    "streamed_language_model",
    "supervised",
    "task_spec",
]


def task_spec(name: str) -> TaskSpec:
    """The table's entry of that name.

    >>> task_spec("digits-mlp").steps
    2000
    """
    if name not in TASKS:
        raise ValueError(f"{name!r} is not a task; there are {', '.join(TASKS)}.")
    return TASKS[name]


def _image_spec(
    model: Callable, options, name: str, steps: int, size: Size = "8x8", area: Area | None = None
) -> TaskSpec:
    """With an `area`, training images are cropped and mirrored at random."""

    def make(*, data=None, batch=64, blank=False) -> Task:
        images = blank_images(name, size) if blank else load_images(name, data, size)
        return model(images, options, batch, area)

    return TaskSpec(make, steps, batch=64, blank=partial(make, blank=True))


def _imagenet_spec(steps: int, batch: int) -> TaskSpec:
    config = VISION_TRANSFORMERS["b16"]

    def make(*, data=None, batch=batch, remat=False, blank=False) -> Task:
        from celo2.tasks import imagenet

        load = imagenet.load_image_files
        files = imagenet.blank_image_files(config.classes) if blank else load(data)
        model = dataclasses.replace(config, classes=files.classes, remat=remat)
        return imagenet.streamed_vit(imagenet.image_stream(files, batch, config.side), model)

    return TaskSpec(make, steps, batch, blank=partial(make, blank=True))


def _text_spec(size: str, steps: int, batch: int) -> TaskSpec:
    config = LANGUAGE_MODELS[size]
    default = PYTHON_DOCS if config.vocab == BYTES else None

    def make(*, text: str | Corpus | None = default, data=None, batch=batch, remat=False) -> Task:
        model = dataclasses.replace(config, remat=remat)
        if text is None:
            raise ValueError(f"{size} has {config.vocab:,} tokens: name the `text` to train on.")
        if folder := token_folder_path(text, data):
            return streamed_language_model(read_token_folder(folder), model, batch)
        corpus = text if isinstance(text, Corpus) else load_text(text, data)
        return language_model(corpus, model, batch)

    blank = blank_text(config.vocab, config.length + 1)
    return TaskSpec(make, steps, batch, blank=partial(make, text=blank))


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
        train=ppo_trainer,
    )


_mlp_spec = partial(_image_spec, image_mlp)
_full_spec = partial(_image_spec, size="full")
# Names, models and steps; each with and without augmentation, which is for longer runs: within an
# epoch, which is 781 steps, it only makes the task harder.
CIFAR10 = (
    ("vit-tiny", (image_vit, VISION_TRANSFORMERS["small"]), 500),
    ("vit", (image_vit, VISION_TRANSFORMERS["cifar"]), 60),
    ("conv", (image_convnet, CONVNETS["small"]), 200),
    ("resnet", (image_convnet, CONVNETS["resnet"]), 30),
)

# Steps: a minute on two CPU cores with AdamW, or less. A text step is 1,024 to 2,048 tokens, a
# MinAtar step 8,192 actions (a batch is its environments); the paper's run is 1,220 steps.
TASKS: dict[str, TaskSpec] = {
    "digits-mlp": _mlp_spec((32,), "digits", steps=2000),
    "digits-mlp-wide": _mlp_spec((256, 256), "digits", steps=2000),
    "digits-conv": _image_spec(image_convnet, CONVNETS["tiny"], "digits", steps=1000),
    "vit-tiny": _image_spec(image_vit, VISION_TRANSFORMERS["tiny"], "digits", steps=1000),
    **{f"image-mlp-{name}": _mlp_spec((32,), name, steps=2000) for name in IMAGE_SETS},
    **{
        f"image-mlp-28-{name}": _full_spec(image_mlp, (128, 128), name, steps=2000)
        for name in ("mnist", "fashion_mnist")
    },
    "vit-tiny-fashion": _full_spec(
        image_vit, VISION_TRANSFORMERS["small"], "fashion_mnist", steps=700
    ),
    **{
        f"{model}-cifar10{ending}": _full_spec(*options, "cifar10", steps=steps, area=area)
        for model, options, steps in CIFAR10
        for ending, area in (("", None), ("-augmented", SMALL_AREA))
    },
    "mlp-svhn": _mlp_spec((128, 128), "svhn", steps=600),
    "mlp-32-svhn": _full_spec(image_mlp, (128, 128), "svhn", steps=1000),
    "conv-svhn": _image_spec(image_convnet, CONVNETS["tiny"], "svhn", steps=400),
    "vit-svhn": _full_spec(image_vit, VISION_TRANSFORMERS["0.1m"], "svhn", steps=600),
    "text-tiny": _text_spec("tiny", steps=1000, batch=16),
    "lm-tiny": _text_spec("tiny", steps=1000, batch=16),
    "lm-0.3m": _text_spec("0.3m", steps=600, batch=8),
    "lm-0.8m": _text_spec("0.8m", steps=400, batch=8),
    "lm-1m": _text_spec("1m", steps=300, batch=8),
    "lm-3m": _text_spec("3m", steps=150, batch=4),
    "lm-10m": _text_spec("10m", steps=30, batch=4),
    **{f"lm-width-{w}": _text_spec(f"width-{w}", 300, batch=8) for w in (64, 128, 256, 512)},
    # The paper's, with its number of tokens: 20 for each parameter, 10 for the largest.
    "lm30m": _text_spec("lm30m", steps=4_578, batch=256),
    "gpt2": _text_spec("gpt2", steps=4_730, batch=512),
    "gpt3xl": _text_spec("gpt3xl", steps=12_400, batch=512),
    "vit-b16-imagenet": _imagenet_spec(steps=50_000, batch=512),
    **{f"minatar-{game}": _minatar_spec(game, steps=200) for game in GAMES},
}
"""Every task by its name; `task_spec` gives an error that lists them."""
