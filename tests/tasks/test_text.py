import gzip
import lzma

import jax
import numpy as np
import pytest

from celo2.tasks import text
from conftest import SAMPLES

SHAKESPEARE_SHA256 = "c7b80398ef9500a446d64563d16b986610a24704a139ed264da80bb9cf7824c9"


def test_embedded_text_is_long_and_its_last_tenth_validates():
    corpus = text.load_text()
    whole = len(corpus.train) + len(corpus.valid)
    assert whole > 300_000 and corpus.vocab == 256
    assert len(corpus.valid) == whole // 10
    assert b"assert" in corpus.train[:5000].tobytes()  # topics come in alphabetical order
    assert corpus.checksum() == text.load_text("python-docs").checksum()


def test_text_files_are_joined_plain_or_compressed(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"0123456789")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"abcdefghij"))
    (tmp_path / "c.txt.GZ").write_bytes(gzip.compress(b"ABCDEFGHIJ"))
    corpus = text.load_text([tmp_path / "a.txt", str(tmp_path / "b.txt.xz"), tmp_path / "c.txt.GZ"])
    assert corpus.train.tobytes() == b"0123456789abcdefghijABCDEFG"
    assert corpus.valid.tobytes() == b"HIJ"


def test_folder_corpus_keeps_its_own_split(tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"tinyshakespeare_{split}.txt.xz").write_bytes(lzma.compress(split.encode()))
    corpus = text.load_text("tinyshakespeare", tmp_path)
    assert (corpus.train.tobytes(), corpus.valid.tobytes()) == (b"train", b"val")


def test_absent_texts_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="wikipedia_en_train.txt.xz.*python-docs"):
        text.load_text("wikipedia_en", tmp_path)
    with pytest.raises(
        FileNotFoundError, match="'no_such_file' is neither a file nor.*data tokens"
    ):
        text.load_text("no_such_file")


def test_real_shakespeare_loads():
    corpus = text.load_text("tinyshakespeare", SAMPLES)
    assert (len(corpus.train), len(corpus.valid)) == (5593, 1459)
    assert corpus.train.tobytes().startswith(b"First Citizen:\nBefore we proceed any further")
    assert corpus.checksum() == SHAKESPEARE_SHA256


def test_windows_are_runs_of_the_text_from_all_its_places(strict_dtypes):
    tokens = np.arange(40, dtype=np.uint16)
    sample = jax.jit(text.sample_windows, static_argnums=(2, 3))
    cut = np.asarray(sample(jax.numpy.asarray(tokens), jax.random.key(0), 500, 8))
    assert cut.shape == (500, 8) and cut.dtype == np.int32
    assert (np.diff(cut, axis=1) == 1).all()
    assert set(cut[:, 0]) == set(range(33))


def test_too_short_a_text_is_refused():
    with pytest.raises(ValueError, match="3 tokens, fewer than one window of 8"):
        text.sample_windows(jax.numpy.zeros(3, jax.numpy.uint8), jax.random.key(0), 2, 8)
