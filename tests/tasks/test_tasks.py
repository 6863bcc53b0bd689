import itertools

import jax
import numpy as np
import optax
import pytest

from celo2.tasks import (
    TASKS,
    Corpus,
    ImageSet,
    LMConfig,
    Stream,
    ViTConfig,
    image_convnet,
    image_mlp,
    image_vit,
    language_model,
    supervised,
    task_spec,
)
from celo2.tasks.images import IMAGE_SETS, image_file, image_shape
from celo2.tasks.networks import CONVNETS

TINY_LM = LMConfig(16, 1, 8, 16)
NEED_TEXT = ("lm30m", "gpt2", "gpt3xl")
STREAMED = ("vit-b16-imagenet",)  # see test_imagenet.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data folder with one black image in every file."""
    path = tmp_path_factory.mktemp("data")
    for name, size in itertools.product(IMAGE_SETS, ("8x8", "full")):
        x, y = np.zeros((1, *image_shape(name, size)), np.uint8), np.zeros(1, np.uint8)
        np.savez(path / image_file(name, size), train_x=x, train_y=y, test_x=x, test_y=y)
    return path


def colour_set():
    x, y = np.zeros((20, 8, 8, 3), np.uint8), np.zeros(20, np.uint8)
    return ImageSet("black", "test", x, y, x, y)


def corpus():
    tokens = np.tile(np.arange(20, dtype=np.uint8), 120)
    return Corpus("count", "test", tokens, tokens, 256)


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("digits-mlp", 32),
        ("digits-conv", 8),
        ("vit-tiny", 8),
        ("text-tiny", 2),
    ],
)
def test_loss_falls_under_adamw(name, batch):
    trainer = supervised(TASKS[name].make(batch=batch), optax.adamw(3e-3))
    state = trainer.init(jax.random.key(0))
    losses = []
    for key in jax.random.split(jax.random.key(1), 60):
        state, metrics = trainer.step(state, key)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-10:]) < 0.85 * np.mean(losses[:5])


OTHERS = {
    "mlp": lambda: image_mlp(colour_set(), (16,), 16),
    "conv": lambda: image_convnet(colour_set(), CONVNETS["resnet"], 16),
    "vit": lambda: image_vit(colour_set(), ViTConfig(patch=4), 16),
    "tokens": lambda: language_model(corpus(), TINY_LM, 4),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_take_colour_and_tokens_without_dtype_promotion(name, strict_dtypes):
    trainer = supervised(OTHERS[name](), optax.sgd(1e-2), evaluation_batches=2)
    state = jax.eval_shape(trainer.init, jax.random.key(0))
    _, metrics = jax.eval_shape(trainer.step, state, jax.random.key(1))
    assert metrics == jax.eval_shape(trainer.evaluate, state, jax.random.key(1))
    assert metrics["loss"].dtype == np.float32


def test_train_and_valid_batches_come_from_their_own_split():
    x, y = np.zeros((9, 8, 8), np.uint8), np.zeros(9, np.uint8)
    task = image_mlp(ImageSet("split", "test", x, y, x + 255, y + 1), batch=8)
    for split, level in (("train", 0), ("valid", 1)):
        batch_x, batch_y = task.sample(task.data, jax.random.key(0), split)
        assert batch_x.shape == (8, 8, 8, 1)
        np.testing.assert_allclose(batch_x, level, rtol=1e-6)
        np.testing.assert_array_equal(batch_y, level)


def check_batch(spec, task):
    """The task's batch is the one the table states, and has the table's metric."""
    data = task.data.example if isinstance(task.data, Stream) else task.data
    batch = jax.eval_shape(lambda d, k: task.sample(d, k, "train"), data, jax.random.key(0))
    assert {len(leaf) for leaf in jax.tree.leaves(batch)} == {spec.batch}
    params = jax.eval_shape(task.init, jax.random.key(0))
    assert spec.metric in jax.eval_shape(task.loss, params, batch)[1]


@pytest.mark.parametrize(
    "name",
    [n for n, spec in TASKS.items() if spec.train is supervised and n not in STREAMED],
)
def test_default_batch_is_the_one_the_table_states(name, folder):
    text = {"text": corpus()} if name in NEED_TEXT else {}
    check_batch(TASKS[name], TASKS[name].make(data=folder, **text))


@pytest.mark.parametrize("name", [n for n, spec in TASKS.items() if spec.blank is not None])
def test_blank_task_has_the_shapes_of_the_table(name):
    check_batch(TASKS[name], TASKS[name].blank())


@pytest.mark.parametrize("name", NEED_TEXT)
def test_paper_s_language_models_need_a_text(name):
    with pytest.raises(ValueError, match=f"{name} has 50,304 tokens: name the `text`"):
        TASKS[name].make()


def test_language_tasks_take_another_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab" * 2000)
    task = TASKS["lm-tiny"].make(text=tmp_path / "a.txt", batch=2)
    tokens = task.sample(task.data, jax.random.key(0), "train")
    assert tokens.shape == (2, 65)
    assert set(np.unique(tokens)) == set(b"ab")


def test_vocabulary_is_the_corpus_one():
    small = corpus()._replace(vocab=21)
    params = jax.eval_shape(language_model(small, TINY_LM, 4).init, jax.random.key(0))
    assert params["embed"]["table"].shape == (21, 16)
    assert params["lm_head"]["kernel"].shape == (16, 21)


def test_unknown_task_error_lists_the_tasks():
    with pytest.raises(ValueError, match="'digits' is not a task; there are digits-mlp"):
        task_spec("digits")
