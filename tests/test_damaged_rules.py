import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import celo2
from celo2 import rulefile
from rule_files import (
    FILE,
    edit_array,
    edit_config,
    edit_metadata,
    json_values,
    make_rule,
    published,
    rewrite,
    same,
)


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
