"""The authors' published checkpoints: a flax msgpack tree of the MLP's arrays.

They say nothing of the config, and come from strangers as rule files do.
"""

import dataclasses
import hashlib
import itertools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from celo2.rule import CELO2, FEATURES, Rule, RuleConfig, check_shapes
from celo2.rulefile import float32, printable, read_file, unique

BLOCKS = tuple(f"w0__{i}" for i in range(len(FEATURES)))  # the rows of w0, feature by feature


def convert(path: str | os.PathLike[str], config: RuleConfig = CELO2) -> Rule:
    """The rule in one of the authors' published checkpoints (`theta.state`).

    Args:
        path: the checkpoint.
        config: what the checkpoint does not record. `hidden` is taken from the arrays instead.

    >>> rule = convert("theta.state", celo2.CELO2_BASE)  # doctest: +SKIP
    """
    data = read_file(Path(path))
    try:
        weights = _join_blocks(_published_arrays(_unpack(data)))
        config = _fit_config(config, weights)
        weights = float32(weights)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a published checkpoint: {printable(error)}") from error
    sha256 = hashlib.sha256(data).hexdigest()
    return Rule(config, weights, {"converted_from": Path(path).name, "checkpoint_sha256": sha256})


def _unpack(data: bytes) -> Any:
    try:
        import msgpack  # only conversion needs it
    except ImportError as error:
        raise ImportError(
            "published checkpoints need msgpack: pip install 'celo2[convert]'"
        ) from error
    limits = {"max_map_len": 256, "max_array_len": 256, "max_str_len": 256}
    return msgpack.unpackb(
        data,
        object_pairs_hook=lambda pairs: _join_chunks(unique(pairs, "the tree")),
        ext_hook=lambda code, packed: _array(code, msgpack.unpackb(packed, **limits)),
        **limits,
    )


def _array(code: int, content: Any) -> np.ndarray:
    """What flax packs as extension 1 (an array) or 3 (a numpy scalar): shape, dtype name, bytes."""
    if code not in (1, 3) or not isinstance(content, list) or len(content) != 3:
        raise ValueError(f"msgpack extension {code} is not an array as flax writes it.")
    shape, dtype, buffer = content
    if dtype not in ("float16", "float32", "float64") or not isinstance(buffer, bytes):
        raise ValueError(f"array of dtype {dtype!r}; a rule's arrays are floating point.")
    return _reshape(np.frombuffer(buffer, np.dtype(dtype).newbyteorder("<")), shape)


def _join_chunks(tree: dict[str, Any]) -> Any:
    """An array that flax has cut up, joined; any other dict as it is."""
    if "__msgpack_chunked_array__" not in tree:
        return tree
    chunks, shape = tree.get("chunks"), tree.get("shape")
    if not isinstance(chunks, dict) or not isinstance(shape, dict) or not chunks:
        raise ValueError("a chunked array has no chunks or no shape.")
    parts: list[Any] = [chunks.get(str(i)) for i in range(len(chunks))]
    if not all(isinstance(part, np.ndarray) and part.ndim == 1 for part in parts):
        raise ValueError("a chunked array's chunks are not flat arrays, numbered from 0.")
    return _reshape(np.concatenate(parts), [shape.get(str(i)) for i in range(len(shape))])


def _reshape(flat: np.ndarray, shape: Any) -> np.ndarray:
    sizes_are_counts = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    if not sizes_are_counts or len(shape) > 2 or math.prod(shape) != flat.size:
        raise ValueError(f"array of {flat.size} numbers cannot have shape {shape!r}.")
    return flat.reshape(shape)


def _published_arrays(tree: Any) -> dict[str, np.ndarray]:
    for key in ("ff_mod_stack", "~"):
        if not isinstance(tree, dict) or key not in tree:
            raise ValueError(f"it has no {key!r} where the arrays should be.")
        tree = tree[key]
    if not isinstance(tree, dict) or not all(isinstance(a, np.ndarray) for a in tree.values()):
        raise ValueError("it holds something other than arrays.")
    if missing := [name for name in (*BLOCKS, "b0") if name not in tree]:
        raise ValueError(f"arrays missing: {', '.join(missing)}.")
    if flat := [name for name in BLOCKS if tree[name].ndim != 2]:
        raise ValueError(f"arrays that are no matrices: {', '.join(flat)}.")
    return tree


def _join_blocks(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays under our names: the first layer's blocks, one for each feature, become w0."""
    width = arrays["b0"].size
    decays = next(len(arrays[b]) for b, f in zip(BLOCKS, FEATURES, strict=True) if f.per_decay)
    for block, feature in zip(BLOCKS, FEATURES, strict=True):
        shape = (decays if feature.per_decay else 1, width)
        if arrays[block].shape != shape:
            raise ValueError(f"{block} has shape {arrays[block].shape} where {shape} belongs.")
    w0 = np.concatenate([arrays[block] for block in BLOCKS])
    return {"w0": w0, **{name: a for name, a in arrays.items() if name not in BLOCKS}}


def _fit_config(config: RuleConfig, weights: Mapping[str, np.ndarray]) -> RuleConfig:
    """`config` with the hidden widths of `weights`, if it has as many decays as they have."""
    per_decay = sum(feature.per_decay for feature in FEATURES)
    decays = (len(weights["w0"]) - len(FEATURES) + per_decay) // per_decay
    if decays != len(config.momentum_decays):
        raise ValueError(
            f"it was made with {decays} decays and the config has {len(config.momentum_decays)}: "
            "give as many --momentum-decays and --factored-decays."
        )
    hidden: list[int] = []
    for i in itertools.count(1):
        if f"w{i}" not in weights:
            break
        hidden.extend(weights[f"w{i}"].shape[:1])
    config = dataclasses.replace(config, hidden=tuple(hidden))
    check_shapes(config, {name: weight.shape for name, weight in weights.items()})
    return config
