"""Token folders from FineWeb, streamed from a hub that is not there."""

import pytest

from celo2.tasks import documents, tokenize, tokenizer
from celo2.tasks.fetch import FetchError
from celo2.tasks.tokenize import make_tokens


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
    monkeypatch.setattr(documents, "import_extra", lambda name: hub)
    monkeypatch.setattr(documents, "check_online", lambda: None)
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

    monkeypatch.setattr(documents, "import_extra", lambda name: FakeHub(rows()))
    monkeypatch.setattr(documents, "check_online", lambda: None)
    with pytest.raises(FetchError, match="fineweb .*could not be read: ConnectionError: reset"):
        make_tokens(tmp_path / "out", ["fineweb"], tokenizer="bytes")
    assert not list(tmp_path.iterdir())


def test_offline_says_what_needs_no_network(tmp_path, monkeypatch):
    def fail():
        raise FetchError("no answer")

    monkeypatch.setattr(documents, "check_online", fail)
    monkeypatch.setattr(documents, "import_extra", lambda name: None)
    monkeypatch.setattr(tokenizer, "import_extra", lambda name: None)
    path = tmp_path / "a.txt"
    path.write_text("a\nb\n")
    for sources, name in ((["fineweb"], "bytes"), ([path], "gpt2")):
        with pytest.raises(FetchError, match="HF_HUB_OFFLINE=1.*text files.*--tokenizer bytes"):
            make_tokens(tmp_path / "out", sources, tokenizer=name)
    assert not (tmp_path / "out").exists()


def test_missing_library_names_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r'needs tokenizers: pip install "celo2\[data\]"'):
        tokenizer.load_tokenizer("gpt2")
