"""Checkpoints: written by orbax, whole or not at all, and sealed by digests of our own.

A checkpoint is a folder named by its iteration: `state` holds the arrays of the run's state
by name, `meta` a JSON object. Orbax restores a flipped bit without a word, hence the digests.

Each process writes and reads its own parts of arrays that several hold: none has the whole state.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import SingleDeviceSharding

from celo2.runs.folder import RunRefused
from celo2.runs.processes import same_everywhere, some_process

T = TypeVar("T")


def name_arrays(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path, such as `pes.problems.step`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def like_tree(tree: T, arrays: Mapping[str, Any]) -> T:
    """A tree of this structure whose leaves are the arrays of these names."""
    return jax.tree.structure(tree).unflatten(arrays[name] for name in name_arrays(tree))


def digest_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """The SHA-256 of the arrays' names, dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        sha.update(f"{name} {array.dtype.str} {arrays[name].shape}\0".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def digest_json(value: Any) -> str:
    """The SHA-256 of a JSON value, which does not depend on the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


FINGERPRINT_SEEDS = (0x9E3779B9, 0x7F4A7C15)
ON_HOST = 1 << 20  # elements; for fewer, compiling would take longer than summing on the host


def fingerprint(array: Any) -> str:
    """Dtype, shape and 64 bits of the content, as text; independent of the sharding."""
    here = not isinstance(array, jax.Array) or array.is_fully_addressable
    if here and array.size < ON_HOST:
        with np.errstate(over="ignore"):
            sums = _sums(np.asarray(array), np)
    else:
        sums = jax.device_get(_sums_on_devices(array))
    return f"{array.dtype}{list(array.shape)} {int(sums[0]):08x}{int(sums[1]):08x}"


@jax.jit
def _sums_on_devices(array: jax.Array) -> tuple[jax.Array, ...]:
    return _sums(array, jnp)


def _sums(array: Any, xp: ModuleType) -> tuple[Any, ...]:
    bits = _bits(array, xp)
    place = xp.zeros((), xp.uint32)
    for axis in range(bits.ndim):
        stride = math.prod(bits.shape[axis + 1 :])
        along = [-1 if i == axis else 1 for i in range(bits.ndim)]
        steps = xp.arange(bits.shape[axis], dtype=xp.uint32).reshape(along)
        place = place + steps * xp.asarray(stride % 2**32, xp.uint32)
    return tuple(
        xp.sum(
            _mix_bits(bits ^ _mix_bits(place + xp.asarray(seed, xp.uint32), xp), xp),
            dtype=xp.uint32,
        )
        for seed in FINGERPRINT_SEEDS
    )


def _bits(array: Any, xp: ModuleType) -> Any:
    """The elements as uint32; those of 64 bits as two of them, along a new last axis."""
    if array.dtype == bool:
        return array.astype(xp.uint32)
    width = array.dtype.itemsize
    if width <= 4:
        return array.view(f"uint{8 * width}").astype(xp.uint32)
    if xp is jnp:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    return np.ascontiguousarray(array)[..., None].view(np.uint32)


def _mix_bits(x: Any, xp: ModuleType) -> Any:
    """MurmurHash3's finalizer: a bijection of 32 bits, in which every bit affects all others."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> xp.asarray(shift, xp.uint32))) * xp.asarray(factor, xp.uint32)
    return x ^ (x >> xp.asarray(16, xp.uint32))


KEEP = 3
FORMAT = 2


class Checkpoint(NamedTuple):
    """A checkpoint that was read: its arrays by name."""

    iteration: int
    meta: dict[str, Any]
    arrays: dict[str, Any]


class Damage(NamedTuple):
    """A checkpoint that cannot be used, and why."""

    iteration: int
    cause: str


def open_manager(folder: Path) -> ocp.CheckpointManager:
    """What writes to `folder`: it keeps the newest checkpoints and removes unfinished ones."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEEP, cleanup_tmp_directories=True, save_root_metadata=False
    )
    return ocp.CheckpointManager(folder.resolve(), options=options)


def save(
    manager: ocp.CheckpointManager, iteration: int, state: Any, meta: Mapping[str, Any]
) -> None:
    """Starts to write a checkpoint, asynchronously. `meta` holds config and data."""
    # A copy, since the next iterations reuse the state's memory while orbax still reads it.
    arrays = name_arrays(_copy(without_keys(state)))
    meta = {**meta, "format": FORMAT, "iteration": iteration}
    meta["digest"] = run_digest(arrays, meta)
    sealed = {**meta, "seal": digest_json(meta)}
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(sealed))
    manager.save(iteration, args=items, force=True)


def to_state(abstract: Any, found: Checkpoint) -> Any:
    """The state in a checkpoint that was read for the same `abstract`."""
    state = like_tree(abstract, found.arrays)
    return jax.tree.map(
        lambda x, like: jax.random.wrap_key_data(x) if _is_key(like) else x, state, abstract
    )


def stored_shapes(abstract: Any) -> Any:
    """The shapes and shardings of a state as files hold it, random keys as numbers."""
    alone = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda s, like: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=like.sharding or alone),
        jax.eval_shape(without_keys, abstract),
        abstract,
    )


def without_keys(state: Any) -> Any:
    """The state with random keys replaced by their numbers, which files can hold."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def run_digest(arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """A digest of all that decides a run's future: its arrays, its config and its data."""
    marks = {name: fingerprint(array) for name, array in arrays.items()}
    return digest_json([marks, meta["config"], meta["data"]])


def list_iterations(folder: Path) -> list[int]:
    """The iterations of all checkpoints in the folder, in ascending order."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir())


def read_newest(folder: Path, abstract: Any = None) -> tuple[Checkpoint | None, list[Damage]]:
    """The newest checkpoint that every process can read, and the damaged ones after it.

    Its arrays have the shardings of `abstract`, whatever they were when they were saved, or are on
    the host without it. Process 0 decides which checkpoints there are.
    """
    damages = []
    iterations = list_iterations(folder)
    while (iteration := same_everywhere(iterations.pop() if iterations else -1)) >= 0:
        found, cause = _try_everywhere(lambda i: read_one(folder, i, abstract), iteration)
        if cause is None:
            cause = _try_everywhere(_check_digest, found)[1]
        if cause is None:
            return found, damages
        damages.append(Damage(iteration, cause))
    return None, damages


def _try_everywhere(action: Callable[[Any], T], value: Any) -> tuple[T | None, str | None]:
    """What `action` returns here, and why it failed in some process."""
    result, cause = None, None
    try:
        result = action(value)
    except RunRefused:  # for reasons that are the same in all processes
        raise
    except Exception as error:  # whatever a damaged file makes orbax raise
        text = str(error).strip().splitlines()
        cause = text[0][:300] if text else type(error).__name__
    if some_process(cause is not None)[0]:
        return None, cause or "another process cannot read its part"
    return result, None


def read_one(folder: Path, iteration: int, abstract: Any = None) -> Checkpoint:
    """One checkpoint. Each process reads its own parts, without waiting for the others."""
    path = epath.Path((folder / str(iteration)).resolve())
    sealed = json.loads((path / "meta" / "metadata").read_text())
    meta = {name: value for name, value in sealed.items() if name != "seal"}
    if digest_json(meta) != sealed.get("seal") or meta["iteration"] != iteration:
        raise ValueError("its description does not match its SHA-256")
    if meta["format"] != FORMAT:
        raise RunRefused(
            f"{path} was written by another version of celo2, in format {meta['format']}, not "
            f"{FORMAT}: continue the run with celo2 {meta.get('version', 'of that time')}."
        )
    # The handler alone: a Checkpointer would wait for all processes.
    handler = ocp.PyTreeCheckpointHandler()
    stored = handler.metadata(path / "state").tree
    if abstract is None:
        places = dict.fromkeys(stored, ocp.RestoreArgs(restore_type=np.ndarray))
    else:
        expected = name_arrays(abstract)
        _check_shapes(stored, expected)
        places = {
            name: ocp.ArrayRestoreArgs(sharding=s.sharding, global_shape=s.shape, dtype=s.dtype)
            for name, s in expected.items()
        }
    arrays = handler.restore(path / "state", args=ocp.args.PyTreeRestore(restore_args=places))
    return Checkpoint(iteration, meta, arrays)


def _check_digest(found: Checkpoint) -> None:
    """Raises a ValueError unless the arrays are those that were saved; all processes take part."""
    if run_digest(found.arrays, found.meta) != found.meta["digest"]:
        raise ValueError("its arrays do not match their digest")


def _check_shapes(stored: Mapping[str, Any], expected: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    unlike = sorted(expected.keys() ^ stored.keys())
    for name in expected.keys() & stored.keys():
        old, new = stored[name], expected[name]
        if (tuple(old.shape), old.dtype) != (new.shape, new.dtype):
            unlike.append(f"{name} is {old.dtype}{tuple(old.shape)}, not {new.dtype}{new.shape}")
    if unlike:
        raise RunRefused(
            f"The checkpoint was made by another version of celo2: {', '.join(unlike)}."
        )


def put_aside(folder: Path, iteration: int, aside: Path) -> None:
    """Moves a damaged checkpoint to `aside`, so that its number can be used again."""
    aside.mkdir(exist_ok=True)
    shutil.rmtree(aside / str(iteration), ignore_errors=True)
    (folder / str(iteration)).rename(aside / str(iteration))


def clear_unfinished(folder: Path) -> None:
    """Removes what a failed save left, which may be what fills the disk."""
    for path in folder.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path, ignore_errors=True)


@jax.jit
def _copy(state: Any) -> Any:
    return jax.tree.map(jnp.copy, state)
