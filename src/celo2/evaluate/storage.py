"""What a run leaves on disk to go on from, and whether it may."""

import shutil
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from celo2.evaluate.config import RunConfig, from_fields
from celo2.evaluate.optimizers import load_rule
from celo2.evaluate.setup import Setup
from celo2.rulefile import digest
from celo2.runs import checkpoint, records
from celo2.runs.digest import like_tree
from celo2.runs.fields import differences, to_fields
from celo2.runs.folder import RunFolder, RunRefused
from celo2.runs.machine import version
from celo2.runs.processes import in_primary, restore_newest


class Start(NamedTuple):
    """Where a run goes on."""

    step: int
    state: Any
    seconds: float


def identity(config: RunConfig, setup: Setup) -> dict[str, Any]:
    """What a run must share with the one it continues."""
    return {
        "config": to_fields(config),
        "data": {config.task: setup.checksum},
        "rule": setup.rule,
        "version": version(),
    }


def find_start(folder: RunFolder, setup: Setup, config: RunConfig, resume: bool) -> Start | None:
    """The newest whole checkpoint, None to begin; leaves the folder ready to be written."""
    in_primary(lambda: _check(folder, setup, config, resume))
    found, damages = restore_newest(folder.checkpoints, _on_devices(setup.abstract))
    step = None if found is None else found.iteration
    in_primary(lambda: _make_ready(folder, identity(config, setup), step, damages))
    if found is None:
        return None
    state = _with_keys(like_tree(setup.abstract, found.arrays), setup.abstract)
    return Start(found.iteration, state, found.meta["seconds"])


def _check(folder: RunFolder, setup: Setup, config: RunConfig, resume: bool) -> None:
    stored = folder.read_config()
    if stored is not None and not resume:
        raise RunRefused(
            f"{folder.path} holds a run: continue it with --resume, or choose another --out."
        )
    if stored is not None:
        _check_same(folder, identity(config, setup), stored)


def _make_ready(
    folder: RunFolder, ours: dict[str, Any], step: int | None, damages: list[checkpoint.Damage]
) -> None:
    for damage in damages:
        checkpoint.put_aside(folder.checkpoints, damage.iteration, folder.damaged)
    folder.write_config(ours)
    records.cut(folder.records, -1 if step is None else step, "step")


def save(folder: RunFolder, step: int, state: Any, meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint and waits for it."""
    manager = checkpoint.open_manager(folder.checkpoints)
    checkpoint.save(manager, step, _without_keys(state), meta)
    checkpoint.finish(manager)
    manager.close()


def clear(folder: RunFolder) -> None:
    """Removes the checkpoints of a finished run."""
    shutil.rmtree(folder.checkpoints, ignore_errors=True)


def check_finished(folder: RunFolder, config: RunConfig) -> None:
    """Refuses a finished run of another config or rule; its data are not looked at."""
    stored = folder.read_config()  # none where the records were unpacked
    if stored is not None:
        rule = load_rule(config.optimizer)
        ours = {"config": to_fields(config), "rule": None if rule is None else digest(rule)}
        _check_same(folder, ours, stored)


def _check_same(folder: RunFolder, ours: dict[str, Any], stored: dict[str, Any]) -> None:
    unlike = differences(from_fields(ours["config"]), from_fields(stored["config"]))
    lines = [f"{name} is {new!r}, was {old!r}" for name, (new, old) in unlike.items()]
    for name in ("data", "rule"):
        if name in ours and ours[name] != stored[name]:
            lines.append(f"the {name} have another SHA-256")
    if lines:
        raise RunRefused(
            f"{folder.path} holds another run: {'; '.join(lines)}. Resume with what it was started "
            "with, or choose another --out."
        )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _without_keys(state: Any) -> Any:
    """The state with random keys as the numbers in them, which is what files can hold."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)


def _with_keys(state: Any, abstract: Any) -> Any:
    return jax.tree.map(
        lambda x, like: jax.random.wrap_key_data(x) if _is_key(like) else x, state, abstract
    )


def _on_devices(abstract: Any) -> Any:
    """The shapes of what files hold, each with the place it has in a run."""
    alone = SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.eval_shape(_without_keys, abstract)
    return jax.tree.map(
        lambda s, like: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=like.sharding or alone),
        shapes,
        abstract,
    )
