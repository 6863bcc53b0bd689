import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import celo2
from celo2 import encoding, weights
from celo2 import published as published_module
from celo2.rule import CELO2, CELO2_BASE, FEATURES, Rule, RuleConfig, initial_weights

REPOSITORY = Path(__file__).parents[1]
WIDE = RuleConfig(
    hidden=(4, 5, 6),
    momentum_decays=(0.5, 0.9),
    factored_decays=(0.1, 0.2),
    rms_decay=0.123456789,
    form="d_exp_m_avg",
    norm="rolling_norm_clip",
    orthogonalize=False,
    vectors="rule",
)
ORIGIN = {"trained": "by hand", "steps": 3, "rate": 0.1, "list": [1, "é", None], "in": {"a": True}}


def make_rule(config=CELO2, origin=ORIGIN):
    return Rule(config, initial_weights(config, np.random.default_rng(1)), origin)


def same(a, b):
    return ((a.config, a.origin, set(a.weights)) == (b.config, b.origin, set(b.weights))) and all(
        np.array_equal(a.weights[name], b.weights[name]) for name in a.weights
    )


def rewrite(data, change):
    """A rule's file with another header; `change` edits the parsed one."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + data[8 + length :]


def edit_config(**fields):
    def change(header):
        config = json.loads(header["__metadata__"]["config"]) | fields
        config = {name: value for name, value in config.items() if value != "absent"}
        header["__metadata__"]["config"] = json.dumps(config)

    return change


def edit_metadata(**fields):
    def change(header):
        metadata = header["__metadata__"] | fields
        header["__metadata__"] = {k: v for k, v in metadata.items() if v != "absent"}

    return change


def edit_array(name, **fields):
    return lambda header: header[name].update(fields)


# Round trips


@pytest.mark.parametrize("config", [CELO2, CELO2_BASE, WIDE])
def test_load_gives_back_what_was_saved(tmp_path, config):
    rule = make_rule(config)
    celo2.save(rule, tmp_path / "rule.safetensors")
    assert same(celo2.load(tmp_path / "rule.safetensors"), rule)
    assert same(celo2.load(str(tmp_path / "rule.safetensors")), rule)


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
        assert same(encoding.from_bytes(encoding.to_bytes(other), "rule"), rule)
    short = Rule(CELO2, {n: jnp.asarray(w, jnp.bfloat16) for n, w in rule.weights.items()})
    assert encoding.from_bytes(encoding.to_bytes(short), "rule").weights["w0"].dtype == np.float32


def test_equal_rules_make_equal_files_in_another_process():
    code = (
        "import numpy as np, celo2; from celo2 import encoding; from celo2.rule import *\n"
        "rule = Rule(CELO2, initial_weights(CELO2, np.random.default_rng(1)), {'a': 1})\n"
        "print(encoding.to_bytes(rule).hex())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == encoding.to_bytes(make_rule(origin={"a": 1})).hex()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_origin_is_preserved_exactly(origin):
    rule = encoding.from_bytes(encoding.to_bytes(make_rule(origin=origin)), "rule")
    assert rule.origin == origin
    assert json.dumps(rule.origin) == json.dumps(origin)  # tells 1 from 1.0 and True, 0.0 from -0.0


@pytest.mark.parametrize(
    "origin",
    [{1: "a"}, {"a": [{2: 3}]}, {"a": float("nan")}, {"a": object()}, {"a": np.int64(1)}],
)
def test_origin_that_json_would_change_is_refused(origin):
    with pytest.raises(ValueError, match="origin"):
        encoding.to_bytes(make_rule(origin=origin))


def test_origin_that_holds_itself_is_refused():
    origin = {}
    origin["self"] = origin
    with pytest.raises(ValueError, match="origin"):
        encoding.to_bytes(make_rule(origin=origin))


# Saving


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
        encoding.to_bytes(Rule(CELO2, bad))


def test_rules_too_large_to_load_are_not_saved():
    wide = RuleConfig(hidden=(4096, 4096))
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes(wide).items()}
    with pytest.raises(ValueError, match="at most"):
        encoding.to_bytes(Rule(wide, zeros))


def shapes(config):
    return celo2.rule.weight_shapes(config)


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
def test_failed_save_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch, broken):
    path = tmp_path / "rule.safetensors"
    celo2.save(make_rule(), path)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    if broken == "write":
        monkeypatch.setattr(weights, "to_bytes", lambda rule: "not bytes")
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


# Files that are wrong


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
    path.write_bytes(damage(encoding.to_bytes(make_rule())))
    with pytest.raises(ValueError, match=message) as caught:
        celo2.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600 and str(caught.value).isprintable()


def test_non_finite_weight_is_refused_even_with_a_right_digest(monkeypatch):
    rule = make_rule()
    rule.weights["w1"][0, 0] = np.inf
    isfinite = np.isfinite
    monkeypatch.setattr(np, "isfinite", lambda x: np.ones_like(x, bool))
    data = encoding.to_bytes(rule)
    monkeypatch.setattr(np, "isfinite", isfinite)
    with pytest.raises(ValueError, match="w1 holds values that are infinite"):
        encoding.from_bytes(data, "rule")


FILE = encoding.to_bytes(make_rule())
flips = st.lists(st.tuples(st.integers(0, len(FILE) - 1), st.integers(1, 255)), max_size=3)


@settings(max_examples=400, deadline=None)
@given(flips, st.integers(0, len(FILE)) | st.just(len(FILE)))
def test_any_damage_is_noticed(changes, length):
    data = bytearray(FILE)
    for position, mask in changes:
        data[position] ^= mask
    try:
        rule = encoding.from_bytes(bytes(data[:length]), "rule")
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
            encoding.from_bytes(rewrite(FILE, change), "rule")


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
    monkeypatch.setattr(encoding, "_parse", None)
    with open(tmp_path / "large.safetensors", "wb") as file:
        file.truncate(encoding.MAX_FILE + 1)  # a hole: nothing is written
    with pytest.raises(ValueError, match="larger than 64 MB"):
        celo2.load(tmp_path / "large.safetensors")


# Shipped rules


@pytest.mark.parametrize(("name", "config"), [("celo2", CELO2), ("celo2-base", CELO2_BASE)])
def test_shipped_rule_has_its_config_and_was_meta_trained(name, config):
    rule = celo2.pretrained(name)  # warnings are errors here: it has none to give
    assert rule.config == config
    assert rule.origin["made_by"] == "celo2 meta-train"
    assert rule.origin["iterations"] >= 10_000
    assert set(rule.origin["data"]) == {"mnist", "fashion_mnist", "cifar10", "svhn"}


def test_untrained_placeholder_warns(monkeypatch):
    rule = make_rule(origin={"trained": "no"})
    monkeypatch.setattr(weights, "_shipped", lambda name: rule)
    with pytest.warns(UserWarning, match="'celo2' is an untrained placeholder"):
        celo2.pretrained("celo2")


def test_trained_rule_does_not_warn(monkeypatch):
    monkeypatch.setattr(weights, "_shipped", lambda name: make_rule())
    assert same(celo2.pretrained("celo2"), make_rule())


def test_unknown_name_is_answered_with_the_names():
    with pytest.raises(ValueError, match="'velo' is not a shipped rule; there are celo2, celo2-b"):
        celo2.pretrained("velo")


def test_as_rule_takes_rules_names_and_paths(tmp_path, monkeypatch):
    rule = make_rule()
    celo2.save(rule, tmp_path / "rule.safetensors")
    monkeypatch.setattr(weights, "_shipped", lambda name: make_rule(origin={"name": name}))
    assert weights.as_rule(rule) is rule
    assert weights.as_rule("celo2-base").origin == {"name": "celo2-base"}
    assert same(weights.as_rule(tmp_path / "rule.safetensors"), rule)
    assert same(weights.as_rule(str(tmp_path / "rule.safetensors")), rule)
    with pytest.raises(FileNotFoundError, match="shipped rules are celo2, celo2-base"):
        weights.as_rule("velo")
    with pytest.raises(TypeError, match="rule=3 is a int; give a Rule, a shipped name"):
        weights.as_rule(3)


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


# Published checkpoints


def pack(value):
    """What flax's msgpack encoding makes of an array or a numpy scalar."""
    if isinstance(value, (np.ndarray, np.generic)):
        code = 1 if isinstance(value, np.ndarray) else 3
        content = (value.shape, value.dtype.name, value.tobytes())
        return msgpack.ExtType(code, msgpack.packb(content))
    raise TypeError(type(value))


def published_arrays(config=CELO2):
    made = initial_weights(config, np.random.default_rng(2))
    w0, arrays, start = made.pop("w0"), {}, 0
    for i, feature in enumerate(FEATURES):
        end = start + celo2.rule.feature_width(config, feature)
        arrays[f"w0__{i}"] = w0[start:end]
        start = end
    return {**arrays, **made}


def chunked(array, size):
    flat = array.reshape(-1)
    chunks = [flat[i : i + size] for i in range(0, flat.size, size)]
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(i): n for i, n in enumerate(array.shape)},
        "chunks": {str(i): chunk for i, chunk in enumerate(chunks)},
    }


def published(config=CELO2, **changes):
    arrays = published_arrays(config) | changes
    arrays = {name: array for name, array in arrays.items() if array is not None}
    return msgpack.packb({"ff_mod_stack": {"~": arrays}}, default=pack)


def convert(tmp_path, data, config=CELO2):
    (tmp_path / "theta.state").write_bytes(data)
    return published_module.convert(tmp_path / "theta.state", config)


@pytest.mark.parametrize("config", [CELO2, CELO2_BASE, WIDE])
def test_conversion_joins_the_blocks_and_infers_the_widths(tmp_path, config):
    rule = convert(tmp_path, published(config), dataclasses.replace(config, hidden=(1,)))
    expected = initial_weights(config, np.random.default_rng(2))
    assert rule.config == config
    assert all(np.array_equal(rule.weights[name], expected[name]) for name in expected)
    assert rule.origin["converted_from"] == "theta.state"
    assert same(encoding.from_bytes(encoding.to_bytes(rule), "rule"), rule)


def test_conversion_joins_chunked_and_wider_arrays(tmp_path):
    arrays = published_arrays()
    plain = convert(tmp_path, published())
    changed = published(w1=chunked(arrays["w1"], 7), b0=arrays["b0"].astype(np.float64))
    assert all(
        np.array_equal(weight, plain.weights[name])
        for name, weight in convert(tmp_path, changed).weights.items()
    )


ZEROS = np.zeros((8, 8), np.float32)
BAD_CHECKPOINTS = {
    "other decays": (published(WIDE), "2 decays and the config has 3.*--momentum-decays"),
    "missing block": (published(w0__5=None), "missing: w0__5"),
    "missing bias": (published(b1=None), "missing: b1"),
    "unknown array": (published(extra=ZEROS), "unknown: extra"),
    "wide block": (published(w0__5=ZEROS), r"w0__5 has shape \(8, 8\) where \(3, 8\)"),
    "flat block": (published(w0__3=ZEROS[0]), "no matrices: w0__3"),
    "scalar": (published(w0__3=np.float32(1)), "no matrices: w0__3"),
    "integers": (published(w1=ZEROS.astype(np.int32)), "int32"),
    "objects": (published(w1=ZEROS.astype("S4")), "dtype"),
    "not finite": (published(b0=np.full(8, np.nan, np.float32)), "b0 holds values"),
    "a number": (published(b0=3), "other than arrays"),
    "no chunks": (published(w1={"__msgpack_chunked_array__": True}), "no chunks"),
    "lost chunk": (
        published(w1=chunked(ZEROS, 7) | {"chunks": {"1": ZEROS[0]}}),
        "chunks are not flat",
    ),
    "short chunks": (published(w1=chunked(ZEROS, 7) | {"shape": {"0": 9, "1": 9}}), "64 numbers"),
    "other tree": (msgpack.packb({"params": {}}), "no 'ff_mod_stack'"),
    "list": (msgpack.packb([1, 2]), "no 'ff_mod_stack'"),
    "empty": (b"", "not a published checkpoint"),
    "truncated": (published()[:-1], "not a published checkpoint"),
    "extended": (published() + b"\0", "not a published checkpoint"),
    "vast array": (b"\xdd\xff\xff\xff\xff", "max_array_len.256"),
    "vast map": (b"\xdf\xff\xff\xff\xff", "max_map_len.256"),
    "vast text": (b"\xdb\xff\xff\xff\xff", "incomplete"),
    "nested": (b"\x91" * 10**5, "not a published checkpoint"),
    "twice": (b"\x82\xa1a\x01\xa1a\x02", "twice"),
    "complex": (msgpack.packb(msgpack.ExtType(2, msgpack.packb((1, 2)))), "extension 2"),
    "pickle": (pickle.dumps({"a": 1}), "not a published checkpoint"),
    "a rule": (FILE, "not a published checkpoint"),
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_bad_checkpoint_is_refused_with_the_reason(tmp_path, name):
    data, message = BAD_CHECKPOINTS[name]
    with pytest.raises(ValueError, match=message) as caught:
        convert(tmp_path, data)
    assert str(caught.value).isprintable()


CHECKPOINT = published()


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(CHECKPOINT) - 1), st.integers(1, 255)), max_size=3),
    st.integers(0, len(CHECKPOINT)) | st.just(len(CHECKPOINT)),
)
def test_damaged_checkpoint_is_a_rule_or_a_value_error(tmp_path_factory, changes, length):
    data = bytearray(CHECKPOINT)
    for position, mask in changes:
        data[position] ^= mask
    try:  # a checkpoint has no digest: other numbers cannot be noticed
        rule = convert(tmp_path_factory.getbasetemp(), bytes(data[:length]))
    except ValueError:
        return
    assert all(np.isfinite(weight).all() for weight in rule.weights.values())


def find_beside(name):
    """A file that comes with the project's material but is not part of the repository."""
    return next(iter(sorted(REPOSITORY.parent.glob(f"*/{name}"))), None)


def test_published_checkpoint_becomes_the_published_rule():
    file = os.environ.get("CELO2_PUBLISHED") or find_beside("published/celo2_theta.state")
    if not file:
        pytest.skip("set CELO2_PUBLISHED to the authors' theta.state to run this")
    rule = published_module.convert(file)
    assert rule.config == CELO2
    golden = find_beside("golden/celo2_pretrained.npz")
    if not golden:
        pytest.skip("golden/celo2_pretrained.npz is not beside the repository")
    with np.load(golden) as arrays:
        blocks = [arrays[f"theta/w0__{i}"] for i in range(len(FEATURES))]
        assert np.array_equal(rule.weights["w0"], np.concatenate(blocks))
        for name in ("b0", "w1", "b1", "w2", "b2"):
            assert np.array_equal(rule.weights[name], arrays[f"theta/{name}"])
