"""A rule as the bytes of a .safetensors file, and back.

Files come from strangers, so whatever is wrong with one ends in a ValueError that says what.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from celo2.rule import Rule, RuleConfig, check_shapes

FORMAT = 1  # raised when older versions of celo2 could no longer read a file
MAX_FILE = 64 * 2**20  # bytes; the shipped rules have 3,000
MAX_HEADER = 2**20

# What a file that is no rule starts with, and what to tell its owner.
STRANGERS = {
    b"PK\x03\x04": "it is a zip archive (torch or npz?)",
    b"\x93NUMPY": "it is a numpy array",
    b"\x80": "it looks like a pickle, which celo2 never opens",
    b"\x81": "is it a published checkpoint? Then run: celo2 convert theta.state rule.safetensors",
}


def to_bytes(rule: Rule) -> bytes:
    """The file that holds `rule`; equal rules make equal files."""
    texts, arrays = _texts(rule), float32(rule.weights)
    stamp = _digest(texts, arrays)
    header: dict[str, Any] = {"__metadata__": {"celo2": str(FORMAT), **texts, "sha256": stamp}}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [offset, end]}
        offset = end
    # By hand, since the library writes metadata in a random order and files could not be compared.
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    data = b"".join(
        (len(head).to_bytes(8, "little"), head, *(a.tobytes() for a in arrays.values()))
    )
    from_bytes(data, "the rule to save")  # so that what was saved can be loaded
    return data


def from_bytes(data: bytes, source: str) -> Rule:
    """The rule in a file's bytes; `source` names the file in errors."""
    try:
        return _parse(data)
    except (ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise ValueError(f"{source} is not a usable rule: {printable(error)}") from error


def digest(rule: Rule) -> str:
    """The SHA-256 that a rule's file carries, over its config, origin and arrays."""
    return _digest(_texts(rule), float32(rule.weights))


def printable(error: Exception) -> str:
    """An error's text, fit for a terminal."""
    # A stranger's text may be long, or hold codes that a terminal obeys.
    text = "".join(c if c.isprintable() else "?" for c in str(error))
    return text if len(text) <= 400 else f"{text[:400]}…"


def _parse(data: bytes) -> Rule:
    header = _header(data)
    metadata = header.pop("__metadata__", {})
    _check_metadata(metadata)
    config = _config(_json_object(metadata["config"], "config"))
    origin = _json_object(metadata["origin"], "origin")
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.get("dtype") != "F32":
            raise ValueError(f"array {name} is not F32, the type of a rule's arrays.")
    # Before the arrays are made, so that only as much is allocated as the config needs.
    check_shapes(config, {name: _shape(entry) for name, entry in header.items()})
    arrays = float32(safetensors.numpy.load(data))
    if _digest(metadata, arrays) != metadata["sha256"]:
        raise ValueError("its SHA-256 does not match its content: it was damaged; fetch it again.")
    return Rule(config, arrays, origin)


def _header(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(MAX_HEADER, len(data) - 8):
        hints = (hint for start, hint in STRANGERS.items() if data.startswith(start))
        size = f"it has {len(data)} bytes and claims a header of {length}"
        raise ValueError(f"not a whole safetensors file; {next(hints, size)}.")
    if len(data) > MAX_FILE:
        raise ValueError(f"it has {len(data)} bytes; a rule has at most {MAX_FILE}.")
    return _json_object(data[8 : 8 + length].decode(), "header")


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or "celo2" not in metadata:
        raise ValueError("a safetensors file, but not made by celo2.save.")
    version = metadata["celo2"]
    if not (isinstance(version, str) and version.isascii() and version.isdecimal()):
        raise ValueError(f"format {version!r} is not a number.")
    if int(version) > FORMAT:
        raise ValueError(
            f"format {version} is newer than {FORMAT}, the newest this celo2 reads: "
            "pip install --upgrade celo2."
        )
    for name in ("config", "origin", "sha256"):
        if not isinstance(metadata.get(name), str):
            raise ValueError(f"it has no {name}; write it again with celo2.save.")


def _config(fields: dict[str, Any]) -> RuleConfig:
    known = {field.name for field in dataclasses.fields(RuleConfig)}
    if unknown := sorted(fields.keys() - known):
        raise ValueError(f"unknown config fields: {', '.join(unknown)}; made by a newer celo2?")
    if missing := sorted(known - fields.keys()):
        raise ValueError(f"config fields missing: {', '.join(missing)}.")
    return RuleConfig(**fields)


def _shape(entry: dict[str, Any]) -> tuple[Any, ...]:
    shape = entry.get("shape")
    return tuple(shape) if isinstance(shape, list) else ()


def _json_object(text: str, what: str) -> dict[str, Any]:
    def refuse(constant: str):
        raise ValueError(f"{what} holds {constant}, which is not JSON.")

    value = json.loads(
        text, object_pairs_hook=lambda pairs: unique(pairs, what), parse_constant=refuse
    )
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object.")
    return value


def unique(pairs: list[tuple[Any, Any]], what: str) -> dict[Any, Any]:
    """The pairs as a dict; a ValueError where a key stands twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"{what} names something twice.")
    return result


def _texts(rule: Rule) -> dict[str, str]:
    try:
        if not _has_text_keys(rule.origin):
            raise ValueError("a key is not a string")
        return {
            "config": json.dumps(dataclasses.asdict(rule.config)),
            "origin": json.dumps(dict(rule.origin), allow_nan=False),
        }
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"origin cannot be stored: {error}; use text, finite numbers, lists and dicts."
        ) from error


def _has_text_keys(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _has_text_keys(v) for k, v in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_has_text_keys, value))


def float32(weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays as read-only float32, sorted by name; a ValueError where one is not finite."""
    arrays = {}
    for name, weight in sorted(weights.items()):
        array = np.asarray(weight)
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            raise ValueError(f"{name} has dtype {array.dtype}; a rule's arrays are floating point.")
        with np.errstate(over="ignore"):  # what overflows is refused below
            array = np.array(array, dtype="<f4", order="C")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds values that are infinite or not a number.")
        array.flags.writeable = False
        arrays[name] = array
    return arrays


def _digest(texts: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> str:
    sha = hashlib.sha256()
    for part in (texts["config"], texts["origin"], *arrays):
        sha.update(part.encode() + b"\0")
    for array in arrays.values():
        sha.update(array.tobytes())
    return sha.hexdigest()
