import itertools
import json
import sys
import threading

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celo2.tasks import TASKS, Part, supervised, tokens
from celo2.tasks.networks import LANGUAGE_MODELS
from celo2.tasks.tokenize import make_tokens

LENGTH = 4  # of the windows below


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{i}\n" for i in range(10_000)))
    make_tokens(tmp_path / "out", [tmp_path / "text.txt"], tokenizer="bytes", shard=20_000)
    return tmp_path / "out"


def change(folder, **fields):
    path = folder / "tokens.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=6), data=st.data())
def test_several_files_read_as_one_sequence(sizes, data):
    whole = np.arange(sum(sizes), dtype=np.uint16)
    joined = tokens.join_tokens(np.split(whole, np.cumsum(sizes)[:-1]), vocab=50)
    start = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - start))
    found = tokens.read_tokens(joined, start, count)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, whole[start : start + count])


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (3, 3), (0, 6), (3, -1)])
def test_tokens_beyond_the_ends_are_refused(start, count):
    joined = tokens.join_tokens([np.zeros(2, np.uint16), np.zeros(3, np.uint16)], vocab=50)
    with pytest.raises(IndexError, match="not within the 5"):
        tokens.read_tokens(joined, start, count)


@pytest.mark.parametrize("token", [50, 2**31 + 3])
def test_token_beyond_the_vocabulary_is_refused(token):
    joined = tokens.join_tokens([np.array([1, token, 2], np.uint32)], vocab=50)
    assert tokens.read_tokens(joined, 0, 1) == [1]
    with pytest.raises(ValueError, match="the vocabulary has 50"):
        tokens.read_tokens(joined, 0, 2)


def test_folder_is_memory_mapped_and_little_endian(folder):
    found = tokens.read_token_folder(folder)
    assert [len(a) for a in found.train.arrays] == [20_000, len(found.train.arrays[1])]
    assert all(isinstance(a.base, np.memmap) for a in found.train.arrays)
    raw = (folder / "train-00000.bin").read_bytes()
    assert raw[:10:2].decode() == bytes(tokens.read_tokens(found.train, 0, 5).tolist()).decode()
    assert raw[1::2] == bytes(20_000)


@pytest.mark.parametrize(
    ("vocab", "name"), [(256, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_token_size_follows_the_vocabulary(vocab, name):
    assert tokens.token_dtype(vocab).name == name and tokens.token_dtype(vocab).str[0] == "<"


def test_checksum_changes_with_the_text(tmp_path, folder):
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(text[:-2] + "!\n")
    same = make_tokens(tmp_path / "b", [tmp_path / "text.txt"], tokenizer="bytes", shard=20_000)
    assert same.checksum() != tokens.read_token_folder(folder).checksum()
    assert len(same.checksum()) == 64


def test_verify_finds_a_changed_byte(folder):
    found = tokens.read_token_folder(folder)
    tokens.verify_token_folder(found)
    raw = bytearray((folder / "valid-00000.bin").read_bytes())
    raw[40] ^= 1
    (folder / "valid-00000.bin").write_bytes(raw)
    with pytest.raises(ValueError, match="valid-00000.bin.*damaged"):
        tokens.verify_token_folder(tokens.read_token_folder(folder))


def test_missing_and_short_files_are_named(folder):
    raw = (folder / "train-00001.bin").read_bytes()
    (folder / "train-00001.bin").write_bytes(raw[:-2])
    with pytest.raises(ValueError, match=r"train-00001.bin has .* bytes in place of"):
        tokens.read_token_folder(folder)
    (folder / "train-00001.bin").unlink()
    with pytest.raises(FileNotFoundError, match="lacks train-00001.bin"):
        tokens.read_token_folder(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "other"}, "not the manifest of a token folder"),
        ({"version": 2}, "version 2 of the format.*newer"),
        ({"vocab": "many"}, "vocab='many'"),
        ({"dtype": "uint32"}, "dtype='uint32'.*uint16"),
        ({"vocab": 70_000}, "dtype='uint16'.*uint32"),
        ({"splits": {}}, "does not list the files of train"),
        ({"splits": {"train": {"tokens": 0, "files": []}}}, "train has 0 tokens"),
    ],
)
def test_foreign_manifest_is_refused(folder, fields, message):
    change(folder, **fields)
    with pytest.raises(ValueError, match=message):
        tokens.read_token_folder(folder)


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/passwd", "..", ""])
def test_file_outside_the_folder_is_refused(folder, name):
    files = [{"name": name, "tokens": 1, "sha256": ""}]
    change(folder, splits={"train": {"tokens": 1, "files": files}})
    with pytest.raises(ValueError, match="not in its folder"):
        tokens.read_token_folder(folder)


def test_broken_manifest_is_refused(folder):
    (folder / "tokens.json").write_text('{"format": ')
    with pytest.raises(ValueError, match="not readable as JSON"):
        tokens.read_token_folder(folder)


def test_plain_folder_is_no_token_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokens.json.*celo2 data tokens"):
        tokens.read_token_folder(tmp_path)


def test_folder_is_found_by_path_or_by_name_in_the_data_folder(tmp_path, folder, monkeypatch):
    assert tokens.token_folder_path(str(folder)) == folder
    assert tokens.token_folder_path("out", tmp_path) == folder
    monkeypatch.setenv("CELO2_DATA", str(tmp_path))
    assert tokens.token_folder_path("out") == folder
    assert tokens.token_folder_path("text.txt") is None
    assert tokens.token_folder_path(["a", "b"]) is None


def test_known_texts_are_no_folders(tmp_path, monkeypatch):
    (tmp_path / "python-docs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert tokens.token_folder_path("python-docs") is None
    monkeypatch.setenv("CELO2_DATA", str(tmp_path / "nowhere"))
    assert tokens.token_folder_path("python-docs") is tokens.token_folder_path("a.txt") is None


# Streams of windows.


def in_memory(numbers, vocab=5000):
    """A token folder that is not on disk."""
    joined = tokens.join_tokens([numbers.astype(np.uint16)], vocab)
    return tokens.TokenFolder(
        tokens.Path("nowhere"),
        "test",
        "gpt2",
        vocab,
        0,
        dict.fromkeys(tokens.SPLITS, ()),
        joined,
        joined,
    )


def counting(windows, batch):
    """A stream whose window number i begins with the token i · LENGTH."""
    return tokens.token_stream(in_memory(np.arange(windows * LENGTH + 1)), LENGTH, batch)


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
    with pytest.raises(ValueError, match="4 tokens, fewer than one window of 5"):
        tokens.token_stream(in_memory(np.zeros(LENGTH)), LENGTH, 2)


@pytest.fixture
def long_folder(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{i}\n" for i in range(40_000)))
    return make_tokens(tmp_path / "long", [tmp_path / "a.txt"], tokenizer="bytes", shard=50_000)


def test_language_model_trains_on_a_token_folder(long_folder):
    task = TASKS["lm-tiny"].make(text=str(long_folder.path), batch=4)
    assert task.data.checksum == long_folder.checksum()
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


def test_folder_and_corpus_of_one_text_have_the_same_loss(long_folder):
    streamed = TASKS["lm-tiny"].make(text=long_folder.path, batch=2)
    held = TASKS["lm-tiny"].make(batch=2)
    params = held.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, streamed.init(jax.random.key(0)))
    batch = take(streamed.data, 1, "valid")[0]
    assert streamed.sample(batch, jax.random.key(0), "valid") is batch
    losses = [jax.jit(task.loss)(params, batch)[0] for task in (streamed, held)]
    assert losses[0] == losses[1] > 0


@pytest.mark.parametrize(("vocab", "rows"), [(50_257, 50_304), (256, 256), (32_000, 32_000)])
def test_model_takes_the_vocabulary_of_the_folder_rounded_up(vocab, rows):
    folder = in_memory(np.zeros(2000), vocab)
    task = tokens.streamed_language_model(folder, LANGUAGE_MODELS["lm30m"], 2)
    params = jax.eval_shape(task.init, jax.random.key(0))
    assert params["embed"]["table"].shape == (rows, 384)


def test_vocabulary_larger_than_the_model_is_refused():
    folder = in_memory(np.zeros(2000), 50_257)
    with pytest.raises(ValueError, match=r"50,257 \(gpt2\).*model has 256.*--tokenizer bytes"):
        tokens.streamed_language_model(folder, LANGUAGE_MODELS["tiny"], 2)


def test_missing_grain_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match=r'needs grain: pip install "celo2\[data\]"'):
        tokens.token_stream(in_memory(np.zeros(2000)), LENGTH, 2)
