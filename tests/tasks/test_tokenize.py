import gzip
import json
import lzma
import sys
import tracemalloc

import numpy as np
import pytest

from celo2.tasks import download, tokenize, tokens
from celo2.tasks.download import FetchError
from celo2.tasks.tokenize import load_tokenizer, make_tokens, read_documents

NUMBERS = "".join(f"{i}\n" for i in range(40_000))  # 229 kB: 14 pieces


def text_of(split):
    return bytes(tokens.read_tokens(split, 0, split.count).tolist()).decode()


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
    pieces = list(read_documents([str(tmp_path / "a.txt")]))
    assert "".join(piece.text for piece in pieces) == NUMBERS and len(pieces) == 14
    assert all(piece.text.endswith("\n") for piece in pieces)
    assert [piece.ends for piece in pieces] == 13 * [False] + [True]
    made = make_tokens(tmp_path / "out", [tmp_path / "a.txt"], tokenizer="bytes")
    assert text_of(made.valid) + text_of(made.train) == NUMBERS + "\0"


def test_file_of_a_single_line_is_cut_all_the_same(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100_000)
    pieces = list(read_documents([str(tmp_path / "a.txt")]))
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
    made = make_tokens(tmp_path / "out", [path], tokenizer="bytes", limit=21, report=seen.append)
    assert (made.valid.count, made.train.count) == (5, 20)
    assert seen[-1] == tokenize.TokenProgress(5, 25, 21) and len(seen) == 5


def test_no_file_is_longer_than_a_shard(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [f"{i:06d}" for i in range(100)])
    made = make_tokens(tmp_path / "out", [path], tokenizer="bytes", shard=100)
    assert [file.tokens for file in made.files["train"]] == [100] * 6 + [93]
    assert made.files["train"][6].name == "train-00006.bin"
    assert text_of(made.train).split("\0") == [f"{i:06d}" for i in range(1, 100)] + [""]
    tokens.verify_token_folder(made)


def test_memory_is_bounded_by_the_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize, "BATCH_CHARACTERS", 100_000)
    (tmp_path / "a.txt").write_text(NUMBERS * 30)  # 6.9 MB
    tracemalloc.start()
    make_tokens(tmp_path / "out", [tmp_path / "a.txt"], tokenizer="bytes", shard=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000


def test_interrupted_making_leaves_nothing(tmp_path):
    (tmp_path / "a.txt").write_text(NUMBERS)

    def interrupt(progress):
        if progress.documents == 3:
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
    with pytest.raises(FileExistsError, match="no token folder"):
        make_tokens(tmp_path / "home", [path], tokenizer="bytes", force=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": []}, "Nothing to read"),
        ({"sources": ["none.txt"]}, "'none.txt' is neither a file nor one of fineweb"),
        ({"valid_every": 1}, "valid_every=1 must be at least 2"),
        ({"limit": 0}, "limit=0"),
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
    with pytest.raises(ValueError, match="no token <end>: say with --end-of-text"):
        load_tokenizer(str(words), "<end>")


def test_file_that_is_no_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer's file"):
        load_tokenizer(str(tmp_path / "a.json"))


class FakeHub:
    def __init__(self, rows):
        self.rows, self.asked = rows, []

    def load_dataset(self, *place, **options):
        self.asked.append((place, options))
        return iter(self.rows)


def use_hub(monkeypatch, hub, answers=True):
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setattr(download, "_answers", lambda url, timeout: answers)


def test_fineweb_is_streamed_until_the_limit(tmp_path, monkeypatch):
    read = []

    def rows():
        for i in range(10**9):
            read.append(i)
            yield {"text": f"page {i % 10}", "url": "…"}

    hub = FakeHub(rows())
    use_hub(monkeypatch, hub)
    made = make_tokens(tmp_path / "out", ["fineweb-edu"], tokenizer="bytes", limit=700)
    place, options = hub.asked[0]
    assert place == ("HuggingFaceFW/fineweb-edu", "sample-10BT")
    assert options == {"split": "train", "streaming": True}
    assert made.train.count + made.valid.count == 700 and len(read) <= tokenize.BATCH_DOCUMENTS
    assert made.source == "HuggingFaceFW/fineweb-edu sample-10BT"


def test_broken_stream_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def rows():
        yield {"text": "page"}
        raise ConnectionError("reset")

    use_hub(monkeypatch, FakeHub(rows()))
    with pytest.raises(FetchError, match="fineweb .*could not be read: ConnectionError: reset"):
        make_tokens(tmp_path / "out", ["fineweb"], tokenizer="bytes")
    assert not list(tmp_path.iterdir())


def test_offline_says_what_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    use_hub(monkeypatch, FakeHub([]), answers=False)
    path = tmp_path / "a.txt"
    path.write_text("a\nb\n")
    for sources, name in ((["fineweb"], "bytes"), ([path], "gpt2")):
        with pytest.raises(FetchError, match="HF_HUB_OFFLINE=1.*text files.*--tokenizer bytes"):
            make_tokens(tmp_path / "out", sources, tokenizer=name)
    assert not (tmp_path / "out").exists()


def test_missing_library_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r'needs tokenizers: pip install "celo2\[data\]"'):
        load_tokenizer("gpt2")
