"""Checkpoints: written by orbax, whole or not at all, and sealed by digests of our own.

A checkpoint is a folder named by its iteration: `state` holds the arrays of the run's state
by name, `meta` a JSON object. Orbax restores a flipped bit without a word, hence the digests.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from celo2.runs.digest import digest_arrays, digest_json, name_arrays

KEEP = 3
FORMAT = 1
T = TypeVar("T")


class Checkpoint(NamedTuple):
    """A checkpoint on the host, its digests verified."""

    iteration: int
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]


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
    arrays = name_arrays(_copy(state))
    meta = {**meta, "format": FORMAT, "iteration": iteration}
    meta["digest"] = run_digest(to_host(arrays), meta)
    sealed = {**meta, "seal": digest_json(meta)}
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(sealed))
    manager.save(iteration, args=items, force=True)


def finish(manager: ocp.CheckpointManager) -> None:
    """Waits for the checkpoint under way; raises what went wrong with it."""
    manager.wait_until_finished()


def run_digest(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> str:
    """Of all that decides a run's future: its arrays, its config and its data."""
    return digest_json([digest_arrays(arrays), meta["config"], meta["data"]])


def to_host(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Whole arrays, whichever process holds their parts."""
    if jax.process_count() > 1:
        return multihost_utils.process_allgather(dict(arrays), tiled=True)
    return {name: np.asarray(array) for name, array in arrays.items()}


def list_iterations(folder: Path) -> list[int]:
    """Of all checkpoints in the folder, newest last; by number, never by time."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and p.is_dir())


def read_newest(folder: Path) -> tuple[Checkpoint | None, list[Damage]]:
    """The newest checkpoint that is whole, and those after it that are not."""
    damages = []
    for iteration in reversed(list_iterations(folder)):
        try:
            return read(folder, iteration), damages
        except Exception as error:  # whatever a damaged file makes orbax raise
            damages.append(Damage(iteration, _first_line(error)))
    return None, damages


def read(folder: Path, iteration: int) -> Checkpoint:
    """One checkpoint as host arrays; raises unless both of its digests are right."""
    path = epath.Path((folder / str(iteration)).resolve())
    sealed = json.loads((path / "meta" / "metadata").read_text())
    meta = {name: value for name, value in sealed.items() if name != "seal"}
    if digest_json(meta) != sealed.get("seal") or meta["iteration"] != iteration:
        raise ValueError("its description does not match its SHA-256")
    if meta["format"] > FORMAT:
        raise ValueError(f"its format {meta['format']} is newer than {FORMAT}: upgrade celo2")
    # The handler alone: a Checkpointer would wait for all processes.
    handler = ocp.PyTreeCheckpointHandler()
    names = handler.metadata(path / "state").tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
    arrays = handler.restore(path / "state", args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    if run_digest(arrays, meta) != meta["digest"]:
        raise ValueError("its arrays do not match their SHA-256")
    return Checkpoint(iteration, meta, arrays)


def place(arrays: Mapping[str, np.ndarray], abstract: T) -> T:
    """The state on the devices of `abstract`, however many had it when it was saved."""
    expected = name_arrays(abstract)
    if expected.keys() != arrays.keys():
        unlike = ", ".join(sorted(expected.keys() ^ arrays.keys()))
        raise ValueError(f"The checkpoint was made by another version of celo2: {unlike}.")

    def put(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        array = arrays[name]
        if (array.shape, array.dtype) != (like.shape, like.dtype):
            raise ValueError(f"{name} is {array.dtype}{array.shape} in the checkpoint, not {like}.")
        return jax.make_array_from_callback(like.shape, like.sharding, lambda i: array[i])

    leaves = [put(name, like) for name, like in expected.items()]
    return jax.tree.structure(abstract).unflatten(leaves)


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


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__
