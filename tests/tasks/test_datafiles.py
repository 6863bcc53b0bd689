import gzip
import lzma

import pytest

from celo2.tasks import load_text
from celo2.tasks.tokens import TokenOptions, read_documents


@pytest.mark.parametrize(("ending", "compress"), [("xz", lzma.compress), ("gz", gzip.compress)])
def test_cut_off_file_is_refused(ending, compress, tmp_path):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(compress(b"text" * 100)[:-20])
    with pytest.raises(ValueError, match=f"not a whole .{ending} file"):
        load_text(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"text", mtime=0), "a gzip file, not like text: end its name in .gz"),
        (lzma.compress(b"text"), "a xz file, not like text: end its name in .xz"),
        (b"\x28\xb5\x2f\xfd\x04\x00", "a zstd file, not like text: decompress it first"),
        (b"PK\x03\x04\x14\x00", "a zip file, not like text: unpack it first"),
        (b"PAR1\x15\x04", "a parquet file, not like text: write its text to"),
    ],
    ids=["gzip", "xz", "zstd", "zip", "parquet"],
)
def test_files_that_are_no_text_are_refused(content, message, tmp_path):
    (tmp_path / "corpus.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"corpus.txt' begins like {message}"):
        load_text(tmp_path / "corpus.txt")
    with pytest.raises(ValueError, match=f"corpus.txt' begins like {message}"):
        list(read_documents([str(tmp_path / "corpus.txt")], TokenOptions()))
