import dataclasses
import os
import pickle
import sys

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from celo2 import published as published_module
from celo2 import rulefile
from celo2.rule import CELO2, CELO2_BASE, FEATURES, initial_weights
from celo2.velo import CELO, VeloConfig
from lstm_rules import SMALL, golden_rule, packed, published_tree, random_rule
from rule_files import (
    FILE,
    REPOSITORY,
    WIDE,
    published,
    published_arrays,
    same,
)


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
    assert same(rulefile.from_bytes(rulefile.to_bytes(rule), "rule"), rule)


def test_conversion_takes_wider_arrays(tmp_path):
    plain = convert(tmp_path, published())
    changed = published(b0=published_arrays()["b0"].astype(np.float64))
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
    "chunks": (published(w1={"__msgpack_chunked_array__": True}), "other than arrays"),
    "other shape": (
        published(w1=msgpack.ExtType(1, msgpack.packb([[9, 9], "float32", ZEROS.tobytes()]))),
        r"64 numbers cannot have shape \[9, 9\]",
    ),
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


@pytest.mark.parametrize("name", SMALL)
def test_checkpoint_of_velo_or_celo_is_told_by_its_arrays(name, tmp_path):
    rule = random_rule(SMALL[name])
    tree = published_tree(rule)
    record = {"params": tree, "gen_id": "0123456789abcdef" * 2, "step": 200}
    for data in (packed(tree), packed(record)):
        found = convert(tmp_path, data)
        assert same(dataclasses.replace(found, origin={}), rule)
        assert found.origin["converted_from"] == "theta.state"


def test_what_velo_s_checkpoint_does_not_record_can_be_given(tmp_path):
    (tmp_path / "theta.state").write_bytes(packed(published_tree(random_rule(SMALL["velo"]))))
    found = published_module.convert(tmp_path / "theta.state", bank_scale=1.0, loss_horizon=10)
    assert found.config == VeloConfig("velo", 8, 3, bank_scale=1.0, loss_horizon=10)


def test_pylo_s_two_files_are_velo_s_rule(tmp_path):
    rule = random_rule(SMALL["velo"])
    tree = published_tree(rule)
    layers = {
        theirs: tree["rnn_params"][ours] for theirs, ours in published_module.TORCH_LAYERS.items()
    }
    rnn = {f"{k}.weight": np.ascontiguousarray(v["w"].T) for k, v in layers.items()}
    rnn |= {f"{k}.bias": v["b"] for k, v in layers.items()}
    rnn["lstm_init_state.0"], rnn["lstm_init_state.1"] = tree["lstm_init_state"].values()
    mlp = {
        theirs: np.ascontiguousarray(np.swapaxes(rule.weights[ours], 1, 2))
        if "weights" in theirs
        else rule.weights[ours]
        for theirs, ours in published_module.TORCH_MLP.items()
    }
    mlp["input_weights"] = np.zeros((4, 30), np.float32)  # scratch space
    files = tmp_path / "rnn.safetensors", tmp_path / "mlp.safetensors"
    for file, arrays in zip(files, (rnn, mlp), strict=True):
        save_file(arrays, file)
    for path, other in (files, files[::-1]):
        found = published_module.convert(path, mlp=other)
        assert same(dataclasses.replace(found, origin={}), rule)
    with pytest.raises(ValueError, match="input_bias_.*VeLO for PyTorch is two files"):
        published_module.convert(files[0])


def changed(path, value):
    """A small VeLO checkpoint with another entry, or without it."""
    tree = published_tree(random_rule(SMALL["velo"]))
    *folders, name = path
    place = tree
    for folder in folders:
        place = place[folder]
    place[name] = value
    if value is None:
        del place[name]
    return packed(tree)


BAD_LSTM_CHECKPOINTS = {
    "celo-adam": (changed(["ff_mod_stack"], None), "no MLP, as Celo-Adam"),
    "no layer": (changed(["rnn_params", "rnn/linear"], None), "no array rnn_params / rnn/linear"),
    "no state": (changed(["lstm_init_state"], 3), "no array lstm_init_state / hidden"),
    "no block": (changed(["ff_mod_stack", "~", "w0__3"], None), "missing: w0__3"),
    "flat block": (changed(["ff_mod_stack", "~", "w0__3"], ZEROS), "not of 3 axes: w0__3"),
    "other inputs": (changed(["rnn_params", "linear_1", "w"], ZEROS), "8 inputs; VeLO has 30"),
    "other width": (changed(["rnn_params", "linear_2", "w"], ZEROS), "linear_2.w has shape"),
}


@pytest.mark.parametrize("name", BAD_LSTM_CHECKPOINTS)
def test_bad_checkpoint_of_velo_is_refused_with_the_reason(tmp_path, name):
    data, message = BAD_LSTM_CHECKPOINTS[name]
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, data)


def test_authors_celo_checkpoint_becomes_their_rule():
    file = os.environ.get("CELO2_PUBLISHED_CELO") or find_beside("published/celo_theta.state")
    if not file:
        pytest.skip("set CELO2_PUBLISHED_CELO to the authors' theta.state of Celo to run this")
    rule = published_module.convert(file)
    assert rule.config == CELO
    if golden := find_beside("golden/celo.npz"):
        with np.load(golden) as arrays:
            expected = golden_rule(CELO, dict(arrays), "celo")
        assert all(np.array_equal(w, expected.weights[name]) for name, w in rule.weights.items())


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


def test_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ImportError, match=r'pip install "celo2\[convert\]"'):
        convert(tmp_path, published())
