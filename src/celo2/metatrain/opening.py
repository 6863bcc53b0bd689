"""How a run starts: from nothing, from a rule, or where its newest checkpoint left it."""

import os
from os import PathLike
from typing import Any, TypeVar

from celo2 import rulefile
from celo2.metatrain.config import MetaConfig, from_fields
from celo2.metatrain.families import load_families
from celo2.metatrain.folder import MetaFolder
from celo2.metatrain.outer import build, make_mesh
from celo2.metatrain.run import Run, identity
from celo2.rule import Rule
from celo2.rulefile import digest
from celo2.runs import checkpoint, records
from celo2.runs.checkpoint import Checkpoint, Damage
from celo2.runs.digest import like_tree
from celo2.runs.fields import differences, to_fields
from celo2.runs.folder import RunRefused
from celo2.runs.processes import in_primary, restore_newest
from celo2.runs.records import Row
from celo2.tasks import Task

FRESH = {"elapsed": 0.0, "best": None, "tried": None}
T = TypeVar("T")


def open_run(
    folder: MetaFolder,
    config: MetaConfig,
    data: str | PathLike | None,
    task: Task | None,
    resume: bool,
    init_from: Rule | str | PathLike | None,
) -> Run:
    """A new run, or the one in the folder from its newest checkpoint on."""
    config = from_fields(to_fields(config))  # so that 1 and 1.0 are the same
    families, checksums = load_families(config, data, task)
    program = build(config, families, make_mesh())
    continues = resume and bool(checkpoint.list_iterations(folder.checkpoints))
    rule = None if init_from is None or continues else matching_rule(config, init_from)
    in_primary(lambda: _check(folder, config, checksums, resume))
    found, damages = restore_newest(folder.checkpoints, program.abstract)
    in_primary(lambda: _make_ready(folder, config, checksums, found, damages))
    if found is None:
        state = program.init(None if rule is None else rule.weights)
        meta: dict[str, Any] = FRESH | {"begun_from": _name_rule(rule, init_from)}
    else:
        state, meta = like_tree(program.abstract, found.arrays), found.meta
    iteration = 0 if found is None else found.iteration
    return Run(
        folder=folder,
        config=config,
        names=tuple(name for family in families for name in family.names),
        families=tuple(family.names[0].split("/")[0] for family in families),
        highest_loss=sum(f.problems * f.highest_loss for f in families)
        / sum(f.problems for f in families),
        checksums=checksums,
        program=program,
        manager=checkpoint.open_manager(folder.checkpoints),
        state=state,
        iteration=iteration,
        elapsed_before=meta["elapsed"],
        begun_from=meta["begun_from"],
        best=meta["best"],
        tried=meta["tried"],
        saved=None if found is None else iteration,
        findings=[_damage_row(iteration, damage) for damage in damages],
    )


def _check(folder: MetaFolder, config: MetaConfig, checksums: dict[str, str], resume: bool) -> None:
    """Raises a RunRefused where the folder holds a run that may not be continued so."""
    if folder.has_run() and not resume:
        raise RunRefused(
            f"{folder.path} holds a run: continue it with --resume, or choose another --out."
        )
    stored = folder.read_config()
    if stored is not None:
        check_same(folder, config, checksums, stored)


def _make_ready(
    folder: MetaFolder,
    config: MetaConfig,
    checksums: dict[str, str],
    found: Checkpoint | None,
    damages: list[Damage],
) -> None:
    """Puts damaged checkpoints aside and what came after `found`."""
    if found is not None:
        check_same(folder, config, checksums, found.meta)
    elif damages:
        raise RunRefused(
            f"No checkpoint in {folder.checkpoints} can be read: "
            + "; ".join(f"{d.iteration}: {d.cause}" for d in damages)
            + f". Move {folder.path} away and start anew."
        )
    for damage in damages:
        checkpoint.put_aside(folder.checkpoints, damage.iteration, folder.damaged)
    records.cut(folder.records, 0 if found is None else found.iteration)
    folder.write_config(identity(config, checksums))


def check_same(
    folder: MetaFolder, config: MetaConfig, checksums: dict[str, str], stored: dict[str, Any]
) -> None:
    """Raises a RunRefused that names every field in which a resumed run would differ.

    `iterations` may change under a constant learning rate, which does not depend on it.
    """
    unlike = differences(config, from_fields(stored["config"]))
    if config.decay == "constant":
        unlike.pop("iterations", None)
    lines = [f"{name} is {new!r}, was {old!r}" for name, (new, old) in unlike.items()]
    old_data = stored["data"]
    for name in sorted(checksums.keys() | old_data.keys()):
        new, old = (sums.get(name, "absent")[:12] for sums in (checksums, old_data))
        if checksums.get(name) != old_data.get(name):
            lines.append(f"data {name} has SHA-256 {new}, had {old}")
    if lines:
        raise RunRefused(
            f"{folder.path} holds another run: {'; '.join(lines)}. Resume with what it was started "
            "with, or choose another --out."
        )


def matching_rule(config: MetaConfig, init_from: Rule | str | PathLike) -> Rule:
    """The rule to start from, if it computes what the config says."""
    if config.start != "random" or config.start_mix:
        start = dict(config.start_mix) or config.start
        raise ValueError(f"start={start!r} and init_from were given: give one.")
    rule = rulefile.as_rule(init_from)
    if rule.config != config.rule:
        theirs = from_fields({"rule": to_fields(MetaConfig(rule=rule.config))["rule"]}, config)
        unlike = differences(config, theirs).items()
        raise ValueError(
            "init_from is a rule of another kind: "
            + "; ".join(f"{name} is {old!r}, not {new!r}" for name, (new, old) in unlike)
            + "."
        )
    return rule


def _damage_row(iteration: int, damage: Damage) -> Row:
    cause = f"the checkpoint of iteration {damage.iteration} is damaged: {damage.cause}"
    return {"kind": "warning", "iteration": iteration, "cause": f"{cause}; put aside"}


def _name_rule(rule: Rule | None, init_from: Any) -> dict[str, str] | None:
    if rule is None:
        return None
    name = "a Rule" if isinstance(init_from, Rule) else os.fspath(init_from)
    if os.path.isfile(name):
        name = os.path.basename(name)  # the origin is for others, who don't have our folders
    return {"rule": name, "sha256": digest(rule)}
