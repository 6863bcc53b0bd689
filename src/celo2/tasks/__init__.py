"""Things to train: `TASKS` maps a name to how the task is made and how long a small run is."""

from collections.abc import Callable
from functools import partial

from celo2.tasks import convnet, images, lm, ppo, text, vit
from celo2.tasks.classify import image_convnet, image_mlp, image_vit
from celo2.tasks.images import ImageBank, ImageSet, Size, sample_batch
from celo2.tasks.lm import language_model
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

    def blank(*, batch=64) -> Task:
        return model(images.blank(name, size), options, batch)

    return TaskSpec(make, steps, batch=64, blank=blank)


def _text_spec(size: str, steps: int, batch: int) -> TaskSpec:
    config = lm.CONFIGS[size]
    default = text.EMBEDDED if config.vocab == text.BYTES else None

    def make(*, text: str | Corpus | None = default, data=None, batch=batch) -> Task:
        if text is None:
            raise ValueError(f"{size} has {config.vocab:,} tokens: name the `text` to train on.")
        corpus = text if isinstance(text, Corpus) else _load_text(text, data)
        return language_model(corpus, config, batch)

    def blank(*, batch=batch) -> Task:
        return language_model(_blank_text(config.vocab, config.length + 1), config, batch)

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

# Steps: about a minute on two CPU cores with AdamW. A text step is 1,024 to 2,048 tokens, a
# MinAtar step 8,192 actions (a batch is its environments); the paper's run is 1,220 steps.
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
    # The paper's, with its number of tokens: 20 for each parameter, 10 for the largest.
    "lm30m": _text_spec("lm30m", steps=4_578, batch=256),
    "gpt2": _text_spec("gpt2", steps=4_730, batch=512),
    "gpt3xl": _text_spec("gpt3xl", steps=12_400, batch=512),
    **{f"minatar-{game}": _minatar_spec(game, steps=200) for game in GAMES},
}
