import gzip
import itertools
import json
import lzma
import sys
import threading
import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celo2.tasks import TASKS, Part, tokens
from celo2.tasks.datafiles import FetchError
from celo2.tasks.networks import LANGUAGE_MODELS
from celo2.tasks.tokens import TokenOptions, load_tokenizer, make_tokens, read_documents
from hub import use_hub

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
    joined = tokens.Tokens(np.split(whole, np.cumsum(sizes)[:-1]), vocab=50)
    start = data.draw(st.integers(0, len(whole) - 1))
    count = data.draw(st.integers(1, len(whole) - start))
    found = tokens.read_tokens(joined, start, count)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, whole[start : start + count])


@pytest.mark.parametrize("token", [50, 2**31 + 3])
def test_token_beyond_the_vocabulary_is_refused(token):
    joined = tokens.Tokens([np.array([1, token, 2], np.uint32)], vocab=50)
    assert tokens.read_tokens(joined, 0, 1) == [1]
    with pytest.raises(ValueError, match="in a vocabulary of 50"):
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
    with pytest.raises(ValueError, match=r"train-00001.bin has .* bytes instead of"):
        tokens.read_token_folder(folder)
    (folder / "train-00001.bin").unlink()
    with pytest.raises(FileNotFoundError, match="has no file 'train-00001.bin'"):
        tokens.read_token_folder(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "other"}, "has the format 'other'"),
        ({"version": 2}, "version 2; .*newer"),
        ({"vocab": "many"}, "vocab='many'"),
        ({"dtype": "uint32"}, "dtype='uint32'.*uint16"),
        ({"vocab": 70_000}, "dtype='uint16'.*uint32"),
        ({"splits": {}}, "has no list of train files"),
        ({"splits": {"train": {"files": [{"name": "a"}]}}}, "has no list of train files"),
    ],
)
def test_foreign_manifest_is_refused(folder, fields, message):
    change(folder, **fields)
    with pytest.raises(ValueError, match=message):
        tokens.read_token_folder(folder)


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/passwd", "..", ""])
def test_file_outside_the_folder_is_refused(folder, name):
    files = [{"name": name, "tokens": 1, "sha256": ""}]
    change(folder, splits=dict.fromkeys(tokens.SPLITS, {"tokens": 1, "files": files}))
    with pytest.raises((ValueError, OSError), match="not in its folder|has no file"):
        tokens.read_token_folder(folder)


def test_broken_manifest_is_refused(folder):
    (folder / "tokens.json").write_text('{"format": ')
    with pytest.raises(ValueError, match="not the manifest of a token folder"):
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
    joined = tokens.Tokens([numbers.astype(np.uint16)], vocab)
    return tokens.TokenFolder(
        Path("nowhere"),
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


def test_folder_and_corpus_of_one_text_have_the_same_loss(long_folder):
    streamed = TASKS["lm-tiny"].make(text=str(long_folder.path), batch=2)
    assert streamed.data.checksum == long_folder.checksum()
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
    with pytest.raises(ImportError, match=r'needs grain .*: pip install "celo2\[data\]"'):
        tokens.token_stream(in_memory(np.zeros(2000)), LENGTH, 2)


# Making folders.

NUMBERS = "".join(f"{i}\n" for i in range(40_000))  # 229 kB: 14 pieces


def text_of(split):
    return bytes(tokens.read_tokens(split, 0, split.total).tolist()).decode()


def write_jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


@pytest.fixture
def words(tmp_path):
    """The file of a tokenizer that knows five words."""
    library = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1, "?": 2, "<|endoftext|>": 3, "far": 70_000}
    made = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<|endoftext|>"])
    made.enable_truncation(3)
    made.enable_padding(length=5)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_every_nth_document_validates_and_each_ends_with_end_of_text(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [f"no. {i}" for i in range(7)])
    made = make_tokens(tmp_path / "out", [path], tokenizer="bytes", valid_every=3)
    assert text_of(made.valid) == "no. 0\0no. 3\0no. 6\0"
    assert text_of(made.train) == "no. 1\0no. 2\0no. 4\0no. 5\0"
    assert (made.vocab, made.end_of_text, made.tokenizer) == (256, 0, "bytes")
    splits = json.loads((tmp_path / "out" / "tokens.json").read_text())["splits"]
    assert (splits["valid"]["documents"], splits["train"]["documents"]) == (3, 4)


def test_text_file_is_cut_after_lines_and_ends_once(tmp_path):
    (tmp_path / "a.txt").write_text(NUMBERS)
    pieces = list(read_documents([str(tmp_path / "a.txt")], TokenOptions()))
    assert "".join(piece.text for piece in pieces) == NUMBERS and len(pieces) == 14
    assert all(piece.text.endswith("\n") for piece in pieces)
    assert [piece.ends for piece in pieces] == 13 * [False] + [True]
    made = make_tokens(tmp_path / "out", [tmp_path / "a.txt"], tokenizer="bytes")
    assert text_of(made.valid) + text_of(made.train) == NUMBERS + "\0"


def test_file_of_a_single_line_is_cut_all_the_same(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100_000)
    pieces = list(read_documents([str(tmp_path / "a.txt")], TokenOptions()))
    assert len(pieces) == 4 and sum(len(piece.text) for piece in pieces) == 100_000


@pytest.mark.parametrize(("suffix", "pack"), [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_packed_files_give_the_same_folder(tmp_path, suffix, pack):
    (tmp_path / "a.txt").write_text(NUMBERS)
    (tmp_path / f"a.txt{suffix}").write_bytes(pack(NUMBERS.encode()))
    made = [
        make_tokens(tmp_path / f"out{ending}", [tmp_path / f"a.txt{ending}"], tokenizer="bytes")
        for ending in ("", suffix)
    ]
    assert made[0].checksum() == made[1].checksum()
    cut = (tmp_path / f"a.txt{suffix}").read_bytes()[:-30]
    (tmp_path / f"b.txt{suffix}").write_bytes(cut)
    with pytest.raises(ValueError, match=f"not a whole {suffix} file"):
        make_tokens(tmp_path / "cut", [tmp_path / f"b.txt{suffix}"], tokenizer="bytes")
    assert not (tmp_path / "cut").exists()


def test_line_ends_and_foreign_letters_are_kept(tmp_path):
    texts = ["zwölf\r\nBoxkämpfer", "日本"]
    (tmp_path / "a.txt").write_bytes(texts[0].encode())
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"body": texts[1]}).encode()))
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl.gz"]
    made = make_tokens(tmp_path / "out", files, tokenizer="bytes", field="body", valid_every=2)
    assert (text_of(made.valid), text_of(made.train)) == (texts[0] + "\0", texts[1] + "\0")
    assert made.source == "a.txt, b.jsonl.gz"


@pytest.mark.parametrize("line", ['{"body": "x"}', '{"text": 3}', "[]", "{", "null"])
def test_bad_json_line_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n\n' + line)
    with pytest.raises(ValueError, match="Line 3 of .*a.jsonl.*--field"):
        make_tokens(tmp_path / "out", [tmp_path / "a.jsonl"], tokenizer="bytes")


def test_blank_documents_and_half_characters_do_no_harm(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["a", " \n", "b\ud800"])
    made = make_tokens(tmp_path / "out", [path], tokenizer="bytes", valid_every=2)
    assert (text_of(made.valid), text_of(made.train)) == ("a\0", "b?\0")


def test_text_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="a.txt.*not text in UTF-8"):
        make_tokens(tmp_path / "out", [tmp_path / "a.txt"], tokenizer="bytes")


def test_making_stops_with_the_document_that_reaches_the_limit(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["1234"] * 100)
    seen = []
    made = make_tokens(
        tmp_path / "out",
        [path],
        tokenizer="bytes",
        tokens=21,
        report=lambda *progress: seen.append(progress),
    )
    assert (made.valid.total, made.train.total) == (5, 20)
    assert seen[-1] == (5, 25)


def test_no_file_is_longer_than_a_shard(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [f"{i:06d}" for i in range(100)])
    made = make_tokens(tmp_path / "out", [path], tokenizer="bytes", shard=100)
    assert [file.tokens for file in made.files["train"]] == [100] * 6 + [93]
    assert made.files["train"][6].name == "train-00006.bin"
    assert text_of(made.train).split("\0") == [f"{i:06d}" for i in range(1, 100)] + [""]
    tokens.verify_token_folder(made)


def test_memory_is_bounded_by_the_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 100_000)
    (tmp_path / "a.txt").write_text(NUMBERS * 30)  # 6.9 MB
    tracemalloc.start()
    make_tokens(tmp_path / "out", [tmp_path / "a.txt"], tokenizer="bytes", shard=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000


def test_interrupted_making_leaves_nothing(tmp_path):
    (tmp_path / "a.txt").write_text(NUMBERS)

    def interrupt(documents, count):
        assert documents == 14 and count > len(NUMBERS)
        assert list(tmp_path.glob(".out.*.part/train-00000.bin"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_tokens(tmp_path / "out", [tmp_path / "a.txt"], tokenizer="bytes", report=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_folder_is_replaced_only_by_force(tmp_path):
    files = {name: write_jsonl(tmp_path / f"{name}.jsonl", [name, name]) for name in "ab"}
    out = tmp_path / "out"
    make_tokens(out, [files["a"]], tokenizer="bytes")
    with pytest.raises(FileExistsError, match="exists already.*--force"):
        make_tokens(out, [files["b"]], tokenizer="bytes")
    assert text_of(tokens.read_token_folder(out).train) == "a\0"
    make_tokens(out, [files["b"]], tokenizer="bytes", force=True)
    assert text_of(tokens.read_token_folder(out).train) == "b\0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "out"]


def test_force_fails_without_harm(tmp_path):
    good = write_jsonl(tmp_path / "a.jsonl", ["a", "a"])
    (tmp_path / "b.jsonl").write_text("{")
    make_tokens(tmp_path / "out", [good], tokenizer="bytes")
    with pytest.raises(ValueError, match="Line 1"):
        make_tokens(tmp_path / "out", [tmp_path / "b.jsonl"], tokenizer="bytes", force=True)
    assert text_of(tokens.read_token_folder(tmp_path / "out").train) == "a\0"


def test_force_never_deletes_what_is_no_token_folder(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["a", "a"])
    (tmp_path / "home").mkdir()
    with pytest.raises(FileExistsError, match="not a token folder"):
        make_tokens(tmp_path / "home", [path], tokenizer="bytes", force=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": []}, "Nothing to read"),
        ({"sources": ["none.txt"]}, "'none.txt' is neither a file nor one of fineweb"),
        ({"valid_every": 1}, "valid_every=1 must be at least 2"),
        ({"tokens": 0}, "tokens=0"),
        ({"tokenizer": "none.json"}, "no tokenizer file 'none.json'"),
        ({}, "1 documents .*too few for any to be for train"),
    ],
)
def test_unusable_options_are_refused_and_nothing_is_left(tmp_path, options, message):
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    given = {"sources": [path], "tokenizer": "bytes"} | options
    with pytest.raises((ValueError, OSError), match=message):
        make_tokens(tmp_path / "out", **given)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_tokenizer_file_is_used_whole(tmp_path, words):
    path = write_jsonl(tmp_path / "a.jsonl", ["a b a b a b", "c far"])
    made = make_tokens(tmp_path / "out", [path], tokenizer=str(words))
    assert (made.tokenizer, made.vocab, made.end_of_text) == ("tokenizer.json", 70_001, 3)
    # Neither cut to 3 nor filled up to 5.
    np.testing.assert_array_equal(tokens.read_tokens(made.valid, 0, 7), [0, 1, 0, 1, 0, 1, 3])
    np.testing.assert_array_equal(tokens.read_tokens(made.train, 0, 3), [2, 70_000, 3])
    assert made.train.arrays[0].dtype == np.uint32


def test_end_of_text_spelt_in_a_text_is_text(tmp_path):
    library = pytest.importorskip("tokenizers")
    letters = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    made = library.Tokenizer(library.models.BPE({c: i for i, c in enumerate(letters)}, []))
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|endoftext|>"])
    assert made.encode("<|endoftext|>").ids == [256]
    made.save(str(tmp_path / "t.json"))
    loaded = load_tokenizer(str(tmp_path / "t.json"))
    assert (loaded.vocab, loaded.end_of_text) == (257, 256)
    (row,) = loaded.encode(["<|endoftext|>"])
    assert len(row) == 13 and 256 not in row


def test_end_of_text_can_be_named(words):
    assert load_tokenizer(str(words), "b").end_of_text == 1
    with pytest.raises(ValueError, match="no token <end>: name .* --end-of-text"):
        load_tokenizer(str(words), "<end>")


def test_file_that_is_no_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer file"):
        load_tokenizer(str(tmp_path / "a.json"))


class FakeHub:
    def __init__(self, rows):
        self.rows, self.asked = rows, []

    def load_dataset(self, *place, **options):
        self.asked.append((place, options))
        return iter(self.rows)


def test_fineweb_is_streamed_until_the_limit(tmp_path, monkeypatch):
    read = []

    def rows():
        for i in range(10**9):
            read.append(i)
            yield {"text": f"page {i % 10}", "url": "…"}

    hub = FakeHub(rows())
    use_hub(monkeypatch, hub)
    made = make_tokens(tmp_path / "out", ["fineweb-edu"], tokenizer="bytes", tokens=700)
    place, options = hub.asked[0]
    assert place == ("HuggingFaceFW/fineweb-edu", "sample-10BT")
    assert options == {"split": "train", "streaming": True}
    assert made.train.total + made.valid.total == 700 and len(read) <= tokens.BATCH_DOCUMENTS
    assert made.source == "HuggingFaceFW/fineweb-edu sample-10BT"


def test_broken_stream_leaves_nothing(tmp_path, monkeypatch):

    def rows():
        yield {"text": "page"}
        raise ConnectionError("reset")

    use_hub(monkeypatch, FakeHub(rows()))
    with pytest.raises(FetchError, match="fineweb .*could not be read .*ConnectionError: reset"):
        make_tokens(tmp_path / "out", ["fineweb"], tokenizer="bytes")
    assert not list(tmp_path.iterdir())


def test_offline_says_what_needs_no_network(tmp_path, monkeypatch):
    use_hub(monkeypatch, FakeHub([]), answers=False)
    path = tmp_path / "a.txt"
    path.write_text("a\nb\n")
    for sources, name in ((["fineweb"], "bytes"), ([path], "gpt2")):
        with pytest.raises(FetchError, match="HF_HUB_OFFLINE=1.*text files.*--tokenizer bytes"):
            make_tokens(tmp_path / "out", sources, tokenizer=name)
    assert not (tmp_path / "out").exists()


def test_missing_library_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r'needs tokenizers .*: pip install "celo2\[data\]"'):
        load_tokenizer("gpt2")
