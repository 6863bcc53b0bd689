"""SHA-256 digests by which arrays, configs and whole runs are known."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np

T = TypeVar("T")


def name_arrays(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path, `pes.problems.step` and the like."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def like_tree(tree: T, arrays: Mapping[str, Any]) -> T:
    """The tree with the arrays of these names for its leaves."""
    return jax.tree.structure(tree).unflatten(arrays[name] for name in name_arrays(tree))


def digest_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """Of the arrays' names, dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        sha.update(f"{name} {array.dtype.str} {arrays[name].shape}\0".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def digest_json(value: Any) -> str:
    """Of a JSON value, however its keys are ordered."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
