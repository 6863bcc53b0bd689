"""Rules to save and load, and ways to damage their files."""

import json
from pathlib import Path

import msgpack
import numpy as np
from hypothesis import strategies as st

from celo2 import rulefile
from celo2.rule import CELO2, FEATURES, Rule, RuleConfig, feature_width, initial_weights

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
        end = start + feature_width(config, feature)
        arrays[f"w0__{i}"] = w0[start:end]
        start = end
    return {**arrays, **made}


def published(config=CELO2, **changes):
    arrays = published_arrays(config) | changes
    arrays = {name: array for name, array in arrays.items() if array is not None}
    return msgpack.packb({"ff_mod_stack": {"~": arrays}}, default=pack)


FILE = rulefile.to_bytes(make_rule())
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
