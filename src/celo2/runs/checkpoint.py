"""Checkpoints: written by orbax, whole or not at all, and sealed by digests of our own.

A checkpoint is a folder named by its iteration: `state` holds the arrays of the run's state
by name, `meta` a JSON object. Orbax restores a flipped bit without a word, hence the digests.

Each process writes and reads its own parts of arrays that several hold: none has the whole state.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import SingleDeviceSharding

from celo2.runs.digest import digest_json, like_tree, name_arrays
from celo2.runs.fingerprint import fingerprint
from celo2.runs.folder import RunRefused

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
    """What writes to `folder`, keeps the newest and clears away what a killed process left."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=KEEP, cleanup_tmp_directories=True, save_root_metadata=False
    )
    return ocp.CheckpointManager(folder.resolve(), options=options)


def save(
    manager: ocp.CheckpointManager, iteration: int, state: Any, meta: Mapping[str, Any]
) -> None:
    """Starts to write a checkpoint; `finish` tells how it went. `meta` holds config and data."""
    # A copy, since the next iterations reuse the state's memory while orbax still reads it.
    arrays = name_arrays(_copy(without_keys(state)))
    meta = {**meta, "format": FORMAT, "iteration": iteration}
    meta["digest"] = run_digest(arrays, meta)
    sealed = {**meta, "seal": digest_json(meta)}
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(sealed))
    manager.save(iteration, args=items, force=True)


def to_state(abstract: Any, found: Checkpoint) -> Any:
    """A checkpoint that was read in parts as a state of that structure."""
    state = like_tree(abstract, found.arrays)
    return jax.tree.map(
        lambda x, like: jax.random.wrap_key_data(x) if _is_key(like) else x, state, abstract
    )


def stored_shapes(abstract: Any) -> Any:
    """The shapes of what files hold of a state, each with its place on the devices."""
    alone = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda s, like: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=like.sharding or alone),
        jax.eval_shape(without_keys, abstract),
        abstract,
    )


def without_keys(state: Any) -> Any:
    """The state with random keys as the numbers in them, which is what files can hold."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def finish(manager: ocp.CheckpointManager) -> None:
    """Waits for the checkpoint under way; raises what went wrong with it."""
    manager.wait_until_finished()


def run_digest(arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> str:
    """Of all that decides a run's future: its arrays, its config and its data."""
    marks = {name: fingerprint(array) for name, array in arrays.items()}
    return digest_json([marks, meta["config"], meta["data"]])


def list_iterations(folder: Path) -> list[int]:
    """Of all checkpoints in the folder, newest last; by number, never by time."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir())


def read_newest(folder: Path) -> tuple[Checkpoint | None, list[Damage]]:
    """The newest checkpoint that is whole, on the host, and those after it that are not."""
    damages = []
    for iteration in reversed(list_iterations(folder)):
        try:
            return read(folder, iteration), damages
        except RunRefused:
            raise
        except Exception as error:  # whatever a damaged file makes orbax raise
            damages.append(Damage(iteration, first_line(error)))
    return None, damages


def read(folder: Path, iteration: int) -> Checkpoint:
    """One checkpoint as host arrays; raises unless both of its digests are right."""
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    found = _restore(folder, iteration, lambda names: dict.fromkeys(names, as_numpy))
    check(found)
    return found


def read_parts(folder: Path, iteration: int, abstract: Any) -> Checkpoint:
    """One checkpoint on the devices of `abstract`, however many had it when it was saved.

    A process reads its own parts and does not wait for the others; `check`, which all make
    together, is left to do.
    """
    expected = name_arrays(abstract)

    def places(stored: Mapping[str, Any]) -> dict[str, ocp.ArrayRestoreArgs]:
        _check_shapes(stored, expected)
        return {
            name: ocp.ArrayRestoreArgs(sharding=s.sharding, global_shape=s.shape, dtype=s.dtype)
            for name, s in expected.items()
        }

    return _restore(folder, iteration, places)


def check(found: Checkpoint) -> None:
    """Raises unless the arrays are those that were saved."""
    if run_digest(found.arrays, found.meta) != found.meta["digest"]:
        raise ValueError("its arrays do not match their digest")


def _restore(
    folder: Path, iteration: int, places: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Checkpoint:
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
    wanted = places(handler.metadata(path / "state").tree)
    arrays = handler.restore(path / "state", args=ocp.args.PyTreeRestore(restore_args=wanted))
    return Checkpoint(iteration, meta, arrays)


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
    """Moves a damaged checkpoint out of the way, so that its number can be used again."""
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


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__
