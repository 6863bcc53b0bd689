import itertools
import threading

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celo2.tasks import TASKS, supervised
from celo2.tasks.stream import Part
from celo2.tasks.text import Corpus
from celo2.tasks.tokenize import make_tokens
from celo2.tasks.tokens import Tokens

pytest.importorskip("grain", reason="grain is not installed")
from celo2.tasks.pipeline import stream  # noqa: E402 (after the check)

LENGTH = 4


def counting(windows, batch):
    """A stream whose window number i begins with the token i · LENGTH."""
    tokens = np.arange(windows * LENGTH + 1, dtype=np.uint16)
    return stream(Corpus("count", "test", tokens, tokens, len(tokens)), LENGTH, batch)


def take(found, count, split="train", seed=0, first=0, part=Part()):  # noqa: B008 (immutable)
    batches = found.batches(split, seed, first, part)
    taken = np.stack(list(itertools.islice(batches, count)))
    batches.close()
    return taken


def numbers(batches):
    """Window numbers, in order."""
    return batches[..., 0].ravel() // LENGTH


def test_batches_have_the_promised_shape_and_are_windows():
    found = counting(windows=10, batch=6)
    taken = take(found, 3)
    assert taken.shape[1:] == found.example.shape == (6, LENGTH + 1)
    assert taken.dtype == found.example.dtype == np.int32
    assert (np.diff(taken, axis=2) == 1).all() and (taken[..., 0] % LENGTH == 0).all()


@given(windows=st.integers(1, 40), batch=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_each_window_comes_once_in_an_epoch(windows, batch, seed):
    found = counting(windows, batch)
    rows = numbers(take(found, -(-3 * windows // batch), seed=seed))
    for epoch in range(3):
        part = rows[epoch * windows : (epoch + 1) * windows]
        assert sorted(part) == list(range(windows))


def test_every_epoch_and_every_seed_has_its_own_order():
    found = counting(windows=50, batch=50)
    orders = [tuple(numbers(b)) for seed in range(4) for b in take(found, 3, seed=seed)]
    assert len(set(orders)) == 12  # also not the next epoch of the seed before
    assert tuple(range(50)) not in orders


@given(first=st.integers(0, 30), seed=st.integers(0, 5), split=st.sampled_from(["train", "valid"]))
def test_resumed_stream_continues_with_the_exact_batch(first, seed, split):
    found = counting(windows=17, batch=4)
    whole = take(found, first + 3, split, seed)
    np.testing.assert_array_equal(take(found, 3, split, seed, first), whole[first:])


@given(
    count=st.sampled_from([1, 2, 3, 6]),
    first=st.integers(0, 9),
    split=st.sampled_from(["train", "valid"]),
)
def test_parts_are_together_the_batch_of_one_process(count, first, split):
    found = counting(windows=20, batch=6)
    whole = take(found, 4, split, 3, first)
    for index in range(count):
        part = take(found, 4, split, 3, first, Part(index, count))
        np.testing.assert_array_equal(part, whole[:, index::count])


def test_parts_share_no_window_within_an_epoch():
    found = counting(windows=48, batch=12)
    parts = [set(numbers(take(found, 4, part=Part(i, 3)))) for i in range(3)]
    assert all(len(part) == 16 for part in parts) and len(set.union(*parts)) == 48


def test_validation_is_in_order_and_begins_again():
    found = counting(windows=5, batch=3)
    for seed in (0, 1):
        assert numbers(take(found, 4, "valid", seed)).tolist() == [*range(5), *range(5), 0, 1]


def test_far_batch_is_reached_at_once():
    found = counting(windows=1000, batch=8)
    rows = numbers(take(found, 125, first=125 * 10**9))  # of an epoch nobody has the time to read
    assert sorted(rows) == list(range(1000))


def test_threads_end_with_the_iterator():
    batches = counting(windows=10, batch=2).batches("train", 0, 0, Part())
    next(batches)
    before = {t for t in threading.enumerate() if t.name.startswith("grain-prefetch")}
    assert before
    batches.close()
    for thread in before:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("first", "part", "message"),
    [
        (-1, Part(), "first=-1"),
        (0, Part(2, 2), "no part 2 of 2"),
        (0, Part(0, 5), "batch of 8 rows does not divide into 5 equal parts"),
    ],
)
def test_impossible_parts_are_refused_at_once(first, part, message):
    with pytest.raises(ValueError, match=message):
        counting(windows=10, batch=8).batches("train", 0, first, part)


def test_text_shorter_than_a_window_is_refused():
    tokens = np.zeros(LENGTH, np.uint8)
    with pytest.raises(ValueError, match="4 tokens, fewer than one window of 5"):
        stream(Corpus("short", "test", tokens, tokens, 256), LENGTH, 2)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{i}\n" for i in range(40_000)))
    return make_tokens(tmp_path / "out", [tmp_path / "a.txt"], tokenizer="bytes", shard=50_000)


def test_language_model_trains_on_a_token_folder(folder):
    task = TASKS["lm-tiny"].make(text=str(folder.path), batch=4)
    assert task.data.checksum == folder.checksum()
    batches = task.data.batches("train", 0, 0, Part())
    tx, losses = optax.adamw(3e-3), []
    step = jax.jit(
        lambda data, state, key: supervised(task._replace(data=data), tx).step(state, key)
    )
    state = supervised(task, tx).init(jax.random.key(0))
    for batch in itertools.islice(batches, 40):
        assert batch.shape == (4, 65)
        state, metrics = step(batch, state, jax.random.key(0))
        losses.append(float(metrics["loss"]))
    batches.close()
    assert np.mean(losses[-5:]) < 0.7 * losses[0]


def test_folder_and_corpus_of_one_text_have_the_same_loss(folder):
    streamed = TASKS["lm-tiny"].make(text=folder.path, batch=2)
    held = TASKS["lm-tiny"].make(batch=2)
    params = held.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, streamed.init(jax.random.key(0)))
    batch = take(streamed.data, 1, "valid")[0]
    assert streamed.sample(batch, jax.random.key(0), "valid") is batch
    losses = [jax.jit(task.loss)(params, batch)[0] for task in (streamed, held)]
    assert losses[0] == losses[1] > 0


def with_vocab(folder, vocab):
    tokens = Tokens((np.zeros(2000, np.uint16),), (0,), 2000, vocab)
    return folder._replace(vocab=vocab, train=tokens, valid=tokens, tokenizer="gpt2")


@pytest.mark.parametrize(("vocab", "rows"), [(50_257, 50_304), (256, 256), (32_000, 32_000)])
def test_model_takes_the_vocabulary_of_the_folder_rounded_up(folder, monkeypatch, vocab, rows):
    found = with_vocab(folder, vocab)
    monkeypatch.setattr("celo2.tasks.tokens.read_folder", lambda path: found)
    task = TASKS["lm30m"].make(text=str(folder.path), batch=2)
    params = jax.eval_shape(task.init, jax.random.key(0))
    assert params["embed"]["table"].shape == (rows, 384)


def test_vocabulary_larger_than_the_model_is_refused(folder, monkeypatch):
    monkeypatch.setattr("celo2.tasks.tokens.read_folder", lambda path: with_vocab(folder, 50_257))
    with pytest.raises(ValueError, match=r"50,257 \(gpt2\).*model has 256.*--tokenizer bytes"):
        TASKS["lm-tiny"].make(text=str(folder.path))


def test_missing_grain_names_its_extra(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "grain", None)
    with pytest.raises(ImportError, match=r'needs grain: pip install "celo2\[data\]"'):
        stream(folder, LENGTH, 2)
