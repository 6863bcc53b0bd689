import json
import os
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import celo2
from celo2 import rulefile
from celo2.rule import CELO2, CELO2_BASE, Rule, RuleConfig
from rule_files import (
    ORIGIN,
    WIDE,
    json_values,
    make_rule,
    same,
)


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
    assert json.dumps(rule.origin) == json.dumps(origin)  # tells 1 from 1.0 and True, 0.0 from -0.0


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
