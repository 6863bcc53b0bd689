import gzip
import lzma

import jax
import numpy as np
import pytest

from celo2.tasks import text
from celo2.tasks.documents import read_documents
from conftest import data_folder


def test_embedded_text_is_long_and_its_last_tenth_validates():
    corpus = text.load()
    whole = len(corpus.train) + len(corpus.valid)
    assert whole > 300_000 and corpus.vocab == 256
    assert len(corpus.valid) == whole // 10
    assert b"assert" in corpus.train[:5000].tobytes()  # topics come in alphabetical order
    assert corpus.checksum() == text.load("python-docs").checksum()


def test_text_files_are_joined_plain_or_compressed(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456789")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"abcdefghij"))
    (tmp_path / "c.txt.GZ").write_bytes(gzip.compress(b"ABCDEFGHIJ"))
    corpus = text.load([tmp_path / "a.txt", str(tmp_path / "b.txt.xz"), tmp_path / "c.txt.GZ"])
    assert corpus.train.tobytes() == b"0123456789abcdefghijABCDEFG"
    assert corpus.valid.tobytes() == b"HIJ"


def test_folder_corpus_keeps_its_own_split(tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"tinyshakespeare_{split}.txt.xz").write_bytes(lzma.compress(split.encode()))
    corpus = text.load("tinyshakespeare", tmp_path)
    assert (corpus.train.tobytes(), corpus.valid.tobytes()) == (b"train", b"val")


def test_absent_texts_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="wikipedia_en_train.txt.xz.*python-docs"):
        text.load("wikipedia_en", tmp_path)
    with pytest.raises(
        FileNotFoundError, match="'no_such_file' is neither a file nor.*data tokens"
    ):
        text.load("no_such_file")


@pytest.mark.parametrize(("ending", "compress"), [("xz", lzma.compress), ("gz", gzip.compress)])
def test_cut_off_file_is_refused(ending, compress, tmp_path):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(compress(b"text" * 100)[:-20])
    with pytest.raises(ValueError, match=f"not a whole .{ending} file"):
        text.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"text", mtime=0), "a gzip file, not as a text: end its name in .gz"),
        (lzma.compress(b"text"), "a xz file, not as a text: end its name in .xz"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "a zstd file, not as a text: unpack it first"),
        (b"PK\x03\x04\x14\x00", "a zip file, not as a text: unpack it first"),
        (b"PAR1\x15\x04", "a parquet file, not as a text: write its text to"),
    ],
    ids=["gzip", "xz", "zstd", "zip", "parquet"],
)
def test_files_that_are_no_text_are_refused(content, message, tmp_path):
    (tmp_path / "corpus.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"corpus.txt' begins as {message}"):
        text.load(tmp_path / "corpus.txt")
    with pytest.raises(ValueError, match=f"corpus.txt' begins as {message}"):
        list(read_documents([str(tmp_path / "corpus.txt")]))


def test_real_shakespeare_loads():
    corpus = text.load("tinyshakespeare", data_folder())
    assert (len(corpus.train), len(corpus.valid)) == (1_059_624, 55_770)


def test_windows_are_runs_of_the_text_from_all_its_places(strict_dtypes):
    tokens = np.arange(40, dtype=np.uint16)
    sample = jax.jit(text.windows, static_argnums=(2, 3))
    cut = np.asarray(sample(jax.numpy.asarray(tokens), jax.random.key(0), 500, 8))
    assert cut.shape == (500, 8) and cut.dtype == np.int32
    assert (np.diff(cut, axis=1) == 1).all()
    assert set(cut[:, 0]) == set(range(33))


def test_too_short_a_text_is_refused():
    with pytest.raises(ValueError, match="3 tokens, fewer than one window of 8"):
        text.windows(jax.numpy.zeros(3, jax.numpy.uint8), jax.random.key(0), 2, 8)
