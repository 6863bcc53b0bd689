"""The authors' published checkpoints of Celo2, Celo and VeLO.

Those of Celo2 and Celo are flax msgpack trees of arrays. VeLO's are such a tree, a record that has
it as `params`, or two .safetensors files of the PyTorch port pylo. None says anything of the
config, and they may come from anyone, as rule files may.
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
import safetensors
import safetensors.numpy

from celo2 import velo
from celo2.rule import CELO2, FEATURES, Rule, RuleConfig, check_shapes, feature_rows
from celo2.rulefile import dict_of_unique, float32, import_extra, printable, read_file

BLOCKS = tuple(f"w0__{i}" for i in range(len(FEATURES)))  # the rows of w0, feature by feature


def convert(
    path: str | os.PathLike[str],
    config: RuleConfig = CELO2,
    *,
    mlp: str | os.PathLike[str] | None = None,
    bank_scale: float = velo.VELO.bank_scale,
    loss_horizon: int | None = None,
) -> Rule:
    """The rule in one of the authors' published checkpoints.

    Args:
        path: the checkpoint, `theta.state` of Celo2, Celo or VeLO, VeLO's `params`, or one of
            pylo's two files for VeLO.
        config: what Celo2's checkpoint does not record. `hidden` is taken from the arrays instead.
        mlp: the other one of pylo's two files.
        bank_scale, loss_horizon: what VeLO's checkpoint does not record, see
            celo2.velo.VeloConfig; as the official one has them by default.

    >>> rule = convert("theta.state", celo2.CELO2_BASE)  # doctest: +SKIP
    """
    data = [read_file(Path(p)) for p in (path, mlp) if p is not None]
    try:
        if mlp is not None or _is_safetensors(data[0]):
            tree = _read_torch(data)
        else:
            tree = _unpack(data[0])
        if isinstance(tree, dict) and isinstance(tree.get("params"), dict):
            tree = tree["params"]  # the record of a training run
        if isinstance(tree, dict) and "rnn_params" in tree:
            made = _velo_rule(tree, bank_scale, loss_horizon)
        else:
            weights = _join_blocks(_published_arrays(tree))
            made = Rule(_fit_config(config, weights), float32(weights))
    except (ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is not a published checkpoint: {printable(error)}") from error
    sha256 = hashlib.sha256(b"".join(data)).hexdigest()
    origin = {"converted_from": Path(path).name, "checkpoint_sha256": sha256}
    return dataclasses.replace(made, origin=origin)


def _unpack(data: bytes) -> Any:
    msgpack = import_extra("msgpack", "convert")
    limits = {"max_map_len": 256, "max_array_len": 256, "max_str_len": 256}
    return msgpack.unpackb(
        data,
        object_pairs_hook=lambda pairs: dict_of_unique(pairs, "the tree"),
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
    flat = np.frombuffer(buffer, np.dtype(dtype).newbyteorder("<"))
    sizes_are_counts = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    if not sizes_are_counts or len(shape) > 3 or math.prod(shape) != flat.size:
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
    return tree


def _join_blocks(arrays: dict[str, np.ndarray], banks: tuple[int, ...] = ()) -> dict[str, Any]:
    """The arrays under our names: the first layer's blocks, one for each feature, become w0.

    Each has the axes `banks` first.
    """
    axes = len(banks) + 2
    if flat := [name for name in BLOCKS if arrays[name].ndim != axes]:
        what = "no matrices" if axes == 2 else f"not of {axes} axes"
        raise ValueError(f"arrays that are {what}: {', '.join(flat)}.")
    width = arrays["b0"].shape[-1] if arrays["b0"].ndim else 1
    per_decay = [b for b, feature in zip(BLOCKS, FEATURES, strict=True) if feature.per_decay]
    decays = arrays[per_decay[0]].shape[-2]
    for block, feature in zip(BLOCKS, FEATURES, strict=True):
        shape = (*banks, decays if feature.per_decay else 1, width)
        if arrays[block].shape != shape:
            raise ValueError(f"{block} has shape {arrays[block].shape} where {shape} belongs.")
    w0 = np.concatenate([arrays[block] for block in BLOCKS], -2)
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


# Our names for the layers around the LSTM, by those of the published tree and of pylo's.
LAYERS = {
    "linear": "linear",
    "linear_1": "linear_1",
    "linear_2": "linear_2",
    "rnn/linear": "lstm",
    "rnn_to_controls": "controls",
    "step_size": "step_size",
}
TORCH_LAYERS = {
    "mix_layer1": "linear",
    "mix_layer2": "linear_1",
    "final_mix_layer": "linear_2",
    "lstm.linear": "rnn/linear",
    "rnn_to_controls": "rnn_to_controls",
    "step_size": "step_size",
}
TORCH_MLP = {
    "input_weights_": "w0",
    "input_bias_": "b0",
    "hidden_weights_.0": "w1",
    "hidden_bias_.0": "b1",
    "output_weights_": "w2",
    "output_bias_": "b2",
}


def _velo_rule(tree: dict[str, Any], bank_scale: float, loss_horizon: int | None) -> velo.VeloRule:
    """The rule of VeLO or Celo, which their LSTM's inputs tell apart, in a published tree."""
    if "ff_mod_stack" not in tree:
        raise ValueError("it has an LSTM and no MLP, as Celo-Adam, which celo2 has not.")
    weights = {
        f"{ours}.{part}": _array_at(tree, "rnn_params", theirs, part)
        for theirs, ours in LAYERS.items()
        for part in ("w", "b")
    }
    for part in ("hidden", "cell"):
        weights[f"lstm.{part}"] = _array_at(tree, "lstm_init_state", part)
    mlps = _published_arrays(tree)
    weights |= _join_blocks(mlps, mlps["b0"].shape[:1])
    inputs, width = weights["linear_1.w"].shape if weights["linear_1.w"].ndim == 2 else (0, 0)
    kinds = {kind.inputs: kind for kind in (velo.VELO, velo.CELO)}
    if inputs not in kinds or not width:
        raise ValueError(f"its LSTM has {inputs} inputs; VeLO has 30 and Celo 18.")
    config = dataclasses.replace(
        kinds[inputs],
        lstm=width,
        banks=len(weights["w0"]),
        **({"bank_scale": bank_scale} if kinds[inputs].optimizer == "velo" else {}),
        loss_horizon=loss_horizon,
    )
    return velo.VeloRule(config, float32(weights))


def _array_at(tree: Any, *path: str) -> np.ndarray:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    if not isinstance(tree, np.ndarray):
        raise ValueError(f"it has no array {' / '.join(path)}.")
    return tree


def _is_safetensors(data: bytes) -> bool:
    return data[8:9] == b"{" and int.from_bytes(data[:8], "little") < len(data)


def _read_torch(files: list[bytes]) -> dict[str, Any]:
    """The published tree in pylo's two files, whose matrices are (out, in)."""
    arrays = {name: a for data in files for name, a in safetensors.numpy.load(data).items()}
    initial = {"lstm_init_state.0": "hidden", "lstm_init_state.1": "cell"}
    parts = ("weight", "bias")
    needed = [f"{layer}.{part}" for layer in TORCH_LAYERS for part in parts]
    if missing := [name for name in (*needed, *initial, *TORCH_MLP) if name not in arrays]:
        raise ValueError(
            f"arrays missing: {', '.join(missing)}; VeLO for PyTorch is two files: give that of "
            "its RNN, and that of its MLP as --mlp."
        )
    if flat := [name for name in TORCH_MLP if "weights" in name and arrays[name].ndim != 3]:
        raise ValueError(f"arrays that are not of 3 axes: {', '.join(flat)}.")
    layers = {
        name: {"w": arrays[f"{layer}.weight"].T, "b": arrays[f"{layer}.bias"]}
        for layer, name in TORCH_LAYERS.items()
    }
    mlps = {name: arrays[torch_name] for torch_name, name in TORCH_MLP.items()}
    for name in ("w0", "w1", "w2"):
        mlps[name] = np.swapaxes(mlps[name], 1, 2)
    rows = feature_rows(velo.MLP).values()
    w0 = mlps.pop("w0")
    mlps |= {block: w0[:, at] for block, at in zip(BLOCKS, rows, strict=True)}
    return {
        "rnn_params": layers,
        "lstm_init_state": {name: arrays[torch_name] for torch_name, name in initial.items()},
        "ff_mod_stack": {"~": mlps},
    }
