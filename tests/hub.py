"""A stand-in for the Hugging Face hub: tests use no network."""

import sys
from typing import Any


def be_online(monkeypatch) -> None:
    """Undoes HF_HUB_OFFLINE, which the tests may be run under: the library reads it once."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def use_hub(monkeypatch, datasets: Any, answers: bool = True) -> None:
    """Puts `datasets` in the place of that library; the hub answers its first question, or not."""

    class Session:
        def head(self, url, timeout):
            if not answers:
                raise ConnectionError("no network")

    be_online(monkeypatch)
    monkeypatch.setattr("huggingface_hub.get_session", Session, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
