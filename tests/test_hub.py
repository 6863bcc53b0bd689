import builtins
import json
import time
from pathlib import Path

import numpy as np
import pytest

import celo2
from celo2 import rulefile
from celo2.rule import CELO2, Rule, initial_weights

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
RULE = Rule(CELO2, initial_weights(CELO2, np.random.default_rng(3)), {"trained": "by hand"})


class LocalHub:
    """A hub in a folder: commits go in through `api`, files come out through `download`."""

    def __init__(self, folder: Path):
        self.folder, self.calls = folder, []

    def __call__(self, **options):  # stands for the class HfApi
        return self

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append(("create_repo", repo_id, private))
        (self.folder / repo_id).mkdir(parents=True, exist_ok=exist_ok)

    def create_commit(self, repo_id, operations, *, commit_message):
        self.calls.append(("create_commit", repo_id, commit_message))
        for operation in operations:
            path = self.folder / repo_id / operation.path_in_repo
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(operation.path_or_fileobj)

    def download(self, repo_id, filename, *, revision, etag_timeout, local_files_only):
        self.calls.append(("download", repo_id, filename, revision, local_files_only))
        assert 0 < etag_timeout <= 10
        path = self.folder / repo_id / filename
        if local_files_only or not path.exists():
            raise huggingface_hub.errors.LocalEntryNotFoundError("no such entry")
        return str(path)


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    stand_in = LocalHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", stand_in)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", stand_in.download)
    monkeypatch.setattr(rulefile, "_is_reachable", lambda endpoint: True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return stand_in


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf://ada/rules", ("ada/rules", None, "rule.safetensors")),
        ("hf://ada/rules@v1.0", ("ada/rules", "v1.0", "rule.safetensors")),
        ("hf://ada/rules@refs%2Fpr%2F1", ("ada/rules", "refs/pr/1", "rule.safetensors")),
        ("hf://ada/rules/a/b.safetensors", ("ada/rules", None, "a/b.safetensors")),
        ("hf://ada/rules@v1/b.safetensors", ("ada/rules", "v1", "b.safetensors")),
    ],
)
def test_address_is_read_into_its_parts(text, parts):
    assert rulefile.parse_address(text) == parts


@pytest.mark.parametrize(
    "text",
    [
        "hf://",
        "hf://ada",
        "hf://ada/",
        "hf://ada/rules/",
        "hf://ada/rules@",
        "hf://ada/rules/model.bin",
        "hf://ada/rules/../../x.safetensors",
        "hf://ada/rules\n",
        "hf://-a/rules",
    ],
)
def test_address_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="write hf://user/repo"):
        celo2.load(text)


def test_pushed_rule_can_be_loaded(local_hub):
    files = {"rule.safetensors": rulefile.to_bytes(RULE), "README.md": b"card"}
    assert rulefile.push("ada/rules", files, private=True) == "hf://ada/rules"
    loaded = celo2.load("hf://ada/rules@v1")
    assert loaded.origin == RULE.origin
    assert all(np.array_equal(loaded.weights[n], w) for n, w in RULE.weights.items())
    assert [call[0] for call in local_hub.calls] == ["create_repo", "create_commit", "download"]
    assert local_hub.calls[0] == ("create_repo", "ada/rules", True)
    assert local_hub.calls[2] == ("download", "ada/rules", "rule.safetensors", "v1", False)


def test_damaged_rule_on_the_hub_is_refused_by_its_address(local_hub):
    rulefile.push("ada/rules", {"sub/x.safetensors": rulefile.to_bytes(RULE)[:-1]})
    with pytest.raises(ValueError, match="hf://ada/rules/sub/x.safetensors is not a usable rule"):
        celo2.load("hf://ada/rules/sub/x.safetensors")


@pytest.mark.parametrize("repo", ["rules", "ada/rules/x", "ada/rules@v1", "hf://ada/rules", ""])
def test_push_needs_a_repository(local_hub, repo):
    with pytest.raises(ValueError, match="hub|repository"):
        rulefile.push(repo, {})
    assert local_hub.calls == []


def test_model_card_says_how_to_load_and_what_it_is():
    card = rulefile.model_card(RULE, "hf://ada/rules", rulefile.digest(RULE))
    assert 'celo2.load("hf://ada/rules")' in card
    facts = json.loads(card.split("```json\n")[1].split("```")[0])
    assert facts["config"]["hidden"] == [8, 8]
    assert facts["origin"] == {"trained": "by hand"}
    assert facts["sha256"] == rulefile.digest(RULE)


def test_offline_wish_is_honoured_without_touching_the_network(local_hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(rulefile, "_is_reachable", lambda _: pytest.fail("asked the network"))
    with pytest.raises(FileNotFoundError, match="hf://ada/rules.*HF_HUB_OFFLINE.*give its path"):
        celo2.load("hf://ada/rules")
    assert local_hub.calls == [("download", "ada/rules", "rule.safetensors", None, True)]
    with pytest.raises(ConnectionError, match="ada/rules.*HF_HUB_OFFLINE"):
        rulefile.push("ada/rules", {})


def test_missing_network_is_noticed_quickly(tmp_path, monkeypatch):
    # Port 1 of this machine answers nobody.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(rulefile, "getproxies", dict)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    start = time.monotonic()
    with pytest.raises(FileNotFoundError, match="hf://ada/rules.*out of reach"):
        celo2.load("hf://ada/rules")
    assert time.monotonic() - start < 8


def test_missing_repository_is_file_not_found(local_hub, monkeypatch):
    def missing(*args, **kwargs):
        raise huggingface_hub.errors.EntryNotFoundError("404")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", missing)
    with pytest.raises(FileNotFoundError, match="hf://ada/rules: not found on the hub"):
        celo2.load("hf://ada/rules")


def test_other_failures_name_the_place_and_the_way_out(local_hub, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("teapot")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setattr(local_hub, "create_commit", fail)
    for act in (lambda: celo2.load("hf://ada/rules"), lambda: rulefile.push("ada/rules", {})):
        with pytest.raises(OSError, match="ada/rules.*teapot.*hf auth login"):
            act()


def test_missing_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install celo2\[hub\]"):
        celo2.load("hf://ada/rules")
