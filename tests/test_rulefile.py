"""Rule files: saved, loaded, shipped, damaged, and on the Hugging Face hub."""

import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import celo2
from celo2 import rulefile
from celo2.rule import CELO2, CELO2_BASE, Rule, RuleConfig, initial_weights, make_odd, odd_features
from hub import be_online
from rule_files import (
    FILE,
    ORIGIN,
    WIDE,
    edit_array,
    edit_config,
    edit_metadata,
    json_values,
    make_rule,
    published,
    rewrite,
    same,
)

GATED = dataclasses.replace(CELO2, gated=True, overshoot=0.25)


@pytest.mark.parametrize("config", [CELO2, CELO2_BASE, WIDE, GATED])
def test_load_gives_back_what_was_saved(tmp_path, config):
    rule = make_rule(config)
    celo2.save(rule, tmp_path / "rule.safetensors")
    assert same(celo2.load(tmp_path / "rule.safetensors"), rule)
    assert same(celo2.load(str(tmp_path / "rule.safetensors")), rule)


def test_files_of_rules_as_in_the_paper_have_no_fields_for_extensions(tmp_path):
    for config, expected in ((CELO2, False), (GATED, True)):
        celo2.save(make_rule(config), tmp_path / "rule.safetensors")
        with safetensors.safe_open(tmp_path / "rule.safetensors", "np") as file:
            fields = json.loads(file.metadata()["config"])
            assert [name in fields for name in ("gated", "overshoot")] == [expected] * 2


def test_loaded_arrays_are_read_only_float32(tmp_path):
    celo2.save(make_rule(), tmp_path / "rule.safetensors")
    for array in celo2.load(tmp_path / "rule.safetensors").weights.values():
        assert array.dtype == np.float32
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_other_readers_of_safetensors_can_read_a_rule(tmp_path):
    rule = make_rule()
    celo2.save(rule, tmp_path / "rule.safetensors")
    arrays = safetensors.numpy.load_file(tmp_path / "rule.safetensors")
    assert all(np.array_equal(arrays[name], rule.weights[name]) for name in rule.weights)
    with safetensors.safe_open(tmp_path / "rule.safetensors", "np") as file:
        assert json.loads(file.metadata()["config"])["hidden"] == [8, 8]


def test_jax_and_wider_arrays_are_stored_as_float32():
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    rule = make_rule()
    for wider in (jnp.asarray, lambda w: w.astype(np.float64), lambda w: w[..., ::1]):
        other = Rule(CELO2, {name: wider(w) for name, w in rule.weights.items()}, ORIGIN)
        assert same(rulefile.from_bytes(rulefile.to_bytes(other), "rule"), rule)
    short = Rule(CELO2, {n: jnp.asarray(w, jnp.bfloat16) for n, w in rule.weights.items()})
    assert rulefile.from_bytes(rulefile.to_bytes(short), "rule").weights["w0"].dtype == np.float32


def test_equal_rules_make_equal_files_in_another_process():
    code = (
        "import numpy as np, celo2; from celo2 import rulefile; from celo2.rule import *\n"
        "rule = Rule(CELO2, initial_weights(CELO2, np.random.default_rng(1)), {'a': 1})\n"
        "print(rulefile.to_bytes(rule).hex())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == rulefile.to_bytes(make_rule(origin={"a": 1})).hex()


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_origin_is_preserved_exactly(origin):
    rule = rulefile.from_bytes(rulefile.to_bytes(make_rule(origin=origin)), "rule")
    assert rule.origin == origin
    assert json.dumps(rule.origin) == json.dumps(
        origin
    )  # 1, 1.0 and True differ, and so do 0.0 and -0.0


@pytest.mark.parametrize(
    "origin",
    [{1: "a"}, {"a": [{2: 3}]}, {"a": float("nan")}, {"a": object()}, {"a": np.int64(1)}],
)
def test_origin_that_json_would_change_is_refused(origin):
    with pytest.raises(ValueError, match="origin"):
        rulefile.to_bytes(make_rule(origin=origin))


def test_origin_that_holds_itself_is_refused():
    origin = {}
    origin["self"] = origin
    with pytest.raises(ValueError, match="origin"):
        rulefile.to_bytes(make_rule(origin=origin))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_values_that_float32_cannot_hold_are_not_saved(tmp_path, value):
    rule = make_rule()
    bad = {**rule.weights, "b1": np.full(8, value, np.float64)}
    with pytest.raises(ValueError, match="b1"):
        celo2.save(Rule(CELO2, bad), tmp_path / "rule.safetensors")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, object])
def test_arrays_that_are_not_floating_point_are_not_saved(dtype):
    bad = {**make_rule().weights, "b1": np.zeros(8, dtype)}
    with pytest.raises(ValueError, match="b1 has dtype"):
        rulefile.to_bytes(Rule(CELO2, bad))


def test_rules_too_large_to_load_are_not_saved():
    wide = RuleConfig(hidden=(4096, 4096))
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes(wide).items()}
    with pytest.raises(ValueError, match="at most"):
        rulefile.to_bytes(Rule(wide, zeros))


def shapes(config):
    return celo2.rule.weight_shapes(config)


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
def test_failed_save_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch, broken):
    path = tmp_path / "rule.safetensors"
    celo2.save(make_rule(), path)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    if broken == "write":
        monkeypatch.setattr(rulefile, "to_bytes", lambda rule: "not bytes")
    else:
        monkeypatch.setattr(os, broken, fail)
    with pytest.raises((OSError, TypeError)):
        celo2.save(make_rule(WIDE), path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["rule.safetensors"]
    assert same(celo2.load(path), make_rule())


def test_data_reaches_the_disk_before_the_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: (calls.append("fsync"), fsync(f)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    celo2.save(make_rule(), tmp_path / "rule.safetensors")
    assert calls == ["fsync", "replace"]


def test_save_says_that_the_folder_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder: make it"):
        celo2.save(make_rule(), tmp_path / "nowhere" / "rule.safetensors")
    assert os.listdir(tmp_path) == []


def test_save_refuses_a_folder_as_file(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        celo2.save(make_rule(), tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="permission bits are POSIX")
def test_saved_file_has_ordinary_permissions(tmp_path):
    (tmp_path / "plain").touch()
    celo2.save(make_rule(), tmp_path / "rule.safetensors")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


TWO = (0.9, 0.99)
SHIPPED = dataclasses.replace(
    CELO2, momentum_decays=TWO, factored_decays=TWO, gated=True, overshoot=0.5
)


@pytest.mark.parametrize(("name", "config"), [("celo2", SHIPPED), ("celo2-base", CELO2_BASE)])
def test_shipped_rule_has_its_config_and_its_run_was_ended(name, config):
    rule = celo2.pretrained(name)  # warnings are errors here: it has none to give
    assert rule.config == config
    origin = rule.origin
    assert origin["made_by"] == "celo2 meta-train"
    assert origin["iterations"] == origin["config"]["iterations"] >= 100
    assert set(origin["data"]) >= {"python-docs", "mnist", "fashion_mnist", "cifar10", "svhn"}


def test_shipped_celo2_is_an_odd_linear_mix():
    rule = celo2.pretrained("celo2")
    for name, w in make_odd(rule.config, rule.weights).items():
        np.testing.assert_allclose(w, rule.weights[name], atol=1e-6)
    carry = initial_weights(rule.config, np.random.default_rng(0), "momentum")
    np.testing.assert_allclose(rule.weights["w2"], carry["w2"], atol=1e-6)
    np.testing.assert_allclose(rule.weights["w1"][:, :2], carry["w1"][:, :2], atol=1e-6)
    even = ~odd_features(rule.config)
    for name in ("w0", "g0"):
        assert not rule.weights[name][even, :2].any()
    for name in ("b0", "b1", "b2"):
        assert not rule.weights[name][:2].any()


def test_untrained_placeholder_warns(monkeypatch):
    rule = make_rule(origin={"trained": "no"})
    monkeypatch.setattr(rulefile, "_shipped", lambda name: rule)
    with pytest.warns(UserWarning, match="'celo2' is an untrained placeholder"):
        celo2.pretrained("celo2")


def test_trained_rule_does_not_warn(monkeypatch):
    monkeypatch.setattr(rulefile, "_shipped", lambda name: make_rule())
    assert same(celo2.pretrained("celo2"), make_rule())


def test_unknown_name_is_answered_with_the_names():
    with pytest.raises(ValueError, match="'velo' is not a shipped rule; there are celo2, celo2-b"):
        celo2.pretrained("velo")


def test_as_rule_takes_rules_names_and_paths(tmp_path, monkeypatch):
    rule = make_rule()
    celo2.save(rule, tmp_path / "rule.safetensors")
    monkeypatch.setattr(rulefile, "_shipped", lambda name: make_rule(origin={"name": name}))
    assert rulefile.as_rule(rule) is rule
    assert rulefile.as_rule("celo2-base").origin == {"name": "celo2-base"}
    assert same(rulefile.as_rule(tmp_path / "rule.safetensors"), rule)
    assert same(rulefile.as_rule(str(tmp_path / "rule.safetensors")), rule)
    with pytest.raises(FileNotFoundError, match="shipped rules are celo2, celo2-base"):
        rulefile.as_rule("velo")
    with pytest.raises(TypeError, match="rule=3 is a int; give a Rule, a shipped name"):
        rulefile.as_rule(3)


def test_import_is_light():
    code = (
        "import sys, celo2\n"
        "heavy = {'jax', 'torch', 'huggingface_hub', 'tyro', 'msgpack', 'matplotlib'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
        "print(all(hasattr(celo2, name) for name in celo2.__all__), celo2.__version__)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[0] == "[]"
    assert run.stdout.splitlines()[1].startswith("True ")


def long_origin(header):
    header["__metadata__"]["origin"] = json.dumps({"a": "b" * 2**20})


DAMAGE = {
    "flipped weight": (lambda d: d[:-1] + bytes([d[-1] ^ 1]), "SHA-256"),
    "truncated": (lambda d: d[:-1], "not a usable rule"),
    "extended": (lambda d: d + b"\0", "not a usable rule"),
    "header only": (lambda d: d[:100], "header"),
    "seven bytes": (lambda d: d[:7], "7 bytes"),
    "empty": (lambda d: b"", "0 bytes"),
    "absurd header": (lambda d: b"\xff" * 8 + d[8:], "claims a header of"),
    "long header": (lambda d: rewrite(d, long_origin), "claims a header of"),
    "header not JSON": (lambda d: d[:8] + b"x" + d[9:], "not a usable rule"),
    "header not text": (lambda d: d[:9] + b"\xff" + d[10:], "not a usable rule"),
    "header a list": (lambda d: (2).to_bytes(8, "little") + b"[]", "not a JSON object"),
    "header nested": (lambda d: (10**5).to_bytes(8, "little") + b"[" * 10**5, "not a usable rule"),
    "no metadata": (lambda d: rewrite(d, lambda h: h.pop("__metadata__")), "celo2.save"),
    "metadata a list": (lambda d: rewrite(d, lambda h: h.update(__metadata__=[])), "celo2.save"),
    "no digest": (lambda d: rewrite(d, edit_metadata(sha256="absent")), "sha256.*celo2.save"),
    "wrong digest": (lambda d: rewrite(d, edit_metadata(sha256="0" * 64)), "SHA-256"),
    "other origin": (lambda d: rewrite(d, edit_metadata(origin="{}")), "SHA-256"),
    "other config": (lambda d: rewrite(d, edit_config(form="d_exp_m")), "SHA-256"),
    "origin missing": (lambda d: rewrite(d, edit_metadata(origin="absent")), "no origin"),
    "config a number": (lambda d: rewrite(d, edit_metadata(config=3)), "no config"),
    "config not JSON": (lambda d: rewrite(d, edit_metadata(config="{hidden}")), "not a usable"),
    "config twice": (
        lambda d: rewrite(d, edit_metadata(config='{"form": "d", "form": "d"}')),
        "config names something twice",
    ),
    "config with NaN": (lambda d: rewrite(d, edit_config(rms_decay=float("nan"))), "NaN"),
    "decay too long": (lambda d: rewrite(d, edit_config(rms_decay=10**400)), "decay"),
    "newer format": (lambda d: rewrite(d, edit_metadata(celo2="2")), "--upgrade celo2"),
    "odd format": (lambda d: rewrite(d, edit_metadata(celo2="one")), "not a number"),
    "unknown field": (lambda d: rewrite(d, edit_config(colour="red")), "unknown.*colour"),
    "missing field": (lambda d: rewrite(d, edit_config(form="absent")), "missing: form"),
    "unknown form": (lambda d: rewrite(d, edit_config(form="e")), "form='e' is not one of"),
    "vast hidden": (lambda d: rewrite(d, edit_config(hidden=[4096] * 50_000)), r"hidden=\(4096"),
    "other hidden": (lambda d: rewrite(d, edit_config(hidden=[8, 9])), "shape"),
    "float16": (lambda d: rewrite(d, edit_array("w1", dtype="F16")), "w1 is not F32"),
    "other shape": (lambda d: rewrite(d, edit_array("w1", shape=[4, 16])), "w1 has shape"),
    "shape a word": (lambda d: rewrite(d, edit_array("w1", shape="8")), "w1 has shape"),
    "shape as floats": (lambda d: rewrite(d, edit_array("w1", shape=[8.0, 8.0])), "not a usable"),
    "vast shape": (lambda d: rewrite(d, edit_array("w1", shape=[2**40, 8])), "w1 has shape"),
    "overlap": (lambda d: rewrite(d, edit_array("b1", data_offsets=[0, 32])), "not a usable"),
    "array missing": (lambda d: rewrite(d, lambda h: h.pop("b1")), "missing: b1"),
    "array unknown": (lambda d: rewrite(d, lambda h: h.update(x=h["b1"])), "unknown: x"),
    "array a number": (lambda d: rewrite(d, lambda h: h.update(b1=1)), "b1 is not F32"),
    "array twice": (lambda d: repeat_first_array(d), "header names something twice"),
    "terminal codes": (
        lambda d: rewrite(d, edit_config(**{"\x1b[2J": 1})),
        r"unknown config fields: \?\[2J",
    ),
    "pickle": (lambda d: pickle.dumps({"a": list(range(99))}), "pickle"),
    "zip": (lambda d: b"PK\x03\x04" + bytes(99), "zip archive"),
    "npy": (lambda d: b"\x93NUMPY" + bytes(99), "numpy array"),
    "checkpoint": (lambda d: published(), "celo2 convert"),
    "foreign": (lambda d: safetensors.numpy.save({"w0": np.zeros(3)}), "not made by celo2.save"),
}


def repeat_first_array(data):
    length = int.from_bytes(data[:8], "little")
    head = data[8 : 8 + length].rstrip()
    entry = re.search(rb'"b0":\{.*?\}', head)
    assert entry
    head = head[:-1] + b"," + entry[0] + b"}"
    return len(head).to_bytes(8, "little") + head + data[8 + length :]


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_file_is_refused_with_the_reason(tmp_path, name):
    damage, message = DAMAGE[name]
    path = tmp_path / "rule.safetensors"
    path.write_bytes(damage(rulefile.to_bytes(make_rule())))
    with pytest.raises(ValueError, match=message) as caught:
        celo2.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600 and str(caught.value).isprintable()


def test_non_finite_weight_is_refused_even_with_a_right_digest(monkeypatch):
    rule = make_rule()
    rule.weights["w1"][0, 0] = np.inf
    isfinite = np.isfinite
    monkeypatch.setattr(np, "isfinite", lambda x: np.ones_like(x, bool))
    data = rulefile.to_bytes(rule)
    monkeypatch.setattr(np, "isfinite", isfinite)
    with pytest.raises(ValueError, match="w1 holds values that are infinite"):
        rulefile.from_bytes(data, "rule")


flips = st.lists(st.tuples(st.integers(0, len(FILE) - 1), st.integers(1, 255)), max_size=3)


@settings(max_examples=400, deadline=None)
@given(flips, st.integers(0, len(FILE)) | st.just(len(FILE)))
def test_any_damage_is_noticed(changes, length):
    data = bytearray(FILE)
    for position, mask in changes:
        data[position] ^= mask
    try:
        rule = rulefile.from_bytes(bytes(data[:length]), "rule")
    except ValueError:
        return
    assert same(rule, make_rule())


@settings(max_examples=200, deadline=None)
@given(json_values)
def test_any_metadata_is_a_rule_or_a_value_error(value):
    for change in (
        lambda header: header.update(__metadata__=value),
        lambda header: header.update(w0=value),
        edit_metadata(config=json.dumps(value)),
        edit_config(hidden=value, rms_decay=value, form=value, momentum_decays=value),
        edit_array("w0", shape=value),
    ):
        with pytest.raises(ValueError):
            rulefile.from_bytes(rewrite(FILE, change), "rule")


def test_absent_file_is_file_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file"):
        celo2.load(tmp_path / "rule.safetensors")


def test_absent_file_with_a_shipped_name_suggests_pretrained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape('celo2.pretrained("celo2-base")')):
        celo2.load("celo2-base")


def test_folder_and_device_are_refused(tmp_path):
    for path in (tmp_path, Path(os.devnull)):
        with pytest.raises(ValueError, match="not a file but"):
            celo2.load(path)


def test_oversize_file_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(rulefile, "_parse", None)
    with open(tmp_path / "large.safetensors", "wb") as file:
        file.truncate(rulefile.MAX_FILE + 1)  # a hole: nothing is written
    with pytest.raises(ValueError, match="larger than 64 MB"):
        celo2.load(tmp_path / "large.safetensors")


huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
RULE = Rule(CELO2, initial_weights(CELO2, np.random.default_rng(3)), {"trained": "by hand"})


class LocalHub:
    """A hub in a folder: commits go in through `api`, files come out through `download`."""

    def __init__(self, folder: Path):
        self.folder, self.calls = folder, []

    def __call__(self, **options):  # in place of the class HfApi
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
    monkeypatch.setattr(rulefile, "ask_hub", lambda: None)
    be_online(monkeypatch)
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
    monkeypatch.setattr(rulefile, "ask_hub", lambda: pytest.fail("asked the network"))
    with pytest.raises(FileNotFoundError, match="hf://ada/rules.*HF_HUB_OFFLINE.*give its path"):
        celo2.load("hf://ada/rules")
    assert local_hub.calls == [("download", "ada/rules", "rule.safetensors", None, True)]
    with pytest.raises(ConnectionError, match="ada/rules.*HF_HUB_OFFLINE"):
        rulefile.push("ada/rules", {})


def test_missing_network_is_noticed_quickly(tmp_path, monkeypatch):
    # Port 1 of this machine answers nobody.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    be_online(monkeypatch)
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
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r'needs huggingface_hub .*pip install "celo2\[hub\]"'):
        celo2.load("hf://ada/rules")
