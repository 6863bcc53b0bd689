import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celo2.tasks import tokens
from celo2.tasks.tokenize import make_tokens


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
    joined = tokens.join(np.split(whole, np.cumsum(sizes)[:-1]), vocab=50)
    start = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - start))
    found = tokens.read(joined, start, count)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, whole[start : start + count])


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (3, 3), (0, 6), (3, -1)])
def test_tokens_beyond_the_ends_are_refused(start, count):
    joined = tokens.join([np.zeros(2, np.uint16), np.zeros(3, np.uint16)], vocab=50)
    with pytest.raises(IndexError, match="not within the 5"):
        tokens.read(joined, start, count)


@pytest.mark.parametrize("token", [50, 2**31 + 3])
def test_token_beyond_the_vocabulary_is_refused(token):
    joined = tokens.join([np.array([1, token, 2], np.uint32)], vocab=50)
    assert tokens.read(joined, 0, 1) == [1]
    with pytest.raises(ValueError, match="the vocabulary has 50"):
        tokens.read(joined, 0, 2)


def test_folder_is_memory_mapped_and_little_endian(folder):
    found = tokens.read_folder(folder)
    assert [len(a) for a in found.train.arrays] == [20_000, len(found.train.arrays[1])]
    assert all(isinstance(a.base, np.memmap) for a in found.train.arrays)
    raw = (folder / "train-00000.bin").read_bytes()
    assert raw[:10:2].decode() == bytes(tokens.read(found.train, 0, 5).tolist()).decode()
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
    assert same.checksum() != tokens.read_folder(folder).checksum()
    assert len(same.checksum()) == 64


def test_verify_finds_a_changed_byte(folder):
    found = tokens.read_folder(folder)
    tokens.verify(found)
    raw = bytearray((folder / "valid-00000.bin").read_bytes())
    raw[40] ^= 1
    (folder / "valid-00000.bin").write_bytes(raw)
    with pytest.raises(ValueError, match="valid-00000.bin.*damaged"):
        tokens.verify(tokens.read_folder(folder))


def test_missing_and_short_files_are_named(folder):
    raw = (folder / "train-00001.bin").read_bytes()
    (folder / "train-00001.bin").write_bytes(raw[:-2])
    with pytest.raises(ValueError, match=r"train-00001.bin has .* bytes in place of"):
        tokens.read_folder(folder)
    (folder / "train-00001.bin").unlink()
    with pytest.raises(FileNotFoundError, match="lacks train-00001.bin"):
        tokens.read_folder(folder)


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
        tokens.read_folder(folder)


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/passwd", "..", ""])
def test_file_outside_the_folder_is_refused(folder, name):
    files = [{"name": name, "tokens": 1, "sha256": ""}]
    change(folder, splits={"train": {"tokens": 1, "files": files}})
    with pytest.raises(ValueError, match="not in its folder"):
        tokens.read_folder(folder)


def test_broken_manifest_is_refused(folder):
    (folder / "tokens.json").write_text('{"format": ')
    with pytest.raises(ValueError, match="not readable as JSON"):
        tokens.read_folder(folder)


def test_plain_folder_is_no_token_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokens.json.*celo2 data tokens"):
        tokens.read_folder(tmp_path)


def test_folder_is_found_by_path_or_by_name_in_the_data_folder(tmp_path, folder, monkeypatch):
    assert tokens.find_folder(str(folder)) == folder
    assert tokens.find_folder("out", tmp_path) == folder
    monkeypatch.setenv("CELO2_DATA", str(tmp_path))
    assert tokens.find_folder("out") == folder
    assert tokens.find_folder("text.txt") is None
    assert tokens.find_folder(["a", "b"]) is None


def test_known_texts_are_no_folders(tmp_path, monkeypatch):
    (tmp_path / "python-docs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert tokens.find_folder("python-docs") is None
    monkeypatch.setenv("CELO2_DATA", str(tmp_path / "nowhere"))
    assert tokens.find_folder("python-docs") is tokens.find_folder("a.txt") is None
