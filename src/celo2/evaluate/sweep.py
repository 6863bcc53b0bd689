"""The runs of a recipe, made one after the other.

Several processes may sweep the same folder, also from several machines that share it: each run
is locked by who makes it, and the others take the next.
"""

import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from celo2.evaluate.comparison import Outcome, find_best, name_of, read_outcome
from celo2.evaluate.config import RunConfig
from celo2.evaluate.recipe import Recipe
from celo2.evaluate.run import run
from celo2.rulefile import write_whole
from celo2.runs import records
from celo2.runs.fields import to_fields
from celo2.runs.folder import RunTaken
from celo2.runs.processes import is_primary, some_process
from celo2.runs.records import Row

POLL_SECONDS = 1.0
Stop = Callable[[], bool]
Watch = Callable[[RunConfig, Row], None]


def sweep(
    recipe: Recipe,
    out: str | PathLike,
    *,
    data: str | PathLike | None = None,
    mesh: Mesh | None = None,
    first: int = 0,
    part: bool = False,
    stop: Stop = lambda: False,
    watch: Watch = lambda config, row: None,
) -> Iterator[Outcome]:
    """Makes every run of the recipe under `out`, and yields each as it ends.

    Finished runs are only read, broken ones resumed; one that diverges or fails does not stop the
    others. The best of each optimizer is run with the final seeds when all others have ended.
    `sweep.json` lists the runs of both stages by the names of their folders.

    Args:
        recipe: what to run.
        out: the folder of the runs' folders.
        data: folder of the data files; by default CELO2_DATA, else the cache folder.
        mesh: the devices of every run, see celo2.evaluate.run; several processes that share one
            make each run together.
        first: the tuning run to begin with; processes that share a sweep begin at different ones.
        part: the recipe is only some optimizers of a sweep: leave the others in `sweep.json`.
        stop: asked now and then; True saves the run under way and ends the sweep.
        watch: called with every row of the runs that are made here.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    index = partial(_write_index, folder, recipe, part)
    if is_primary():
        index([c for c in _finals(recipe, folder) if read_outcome(c, folder).end is not None])
    make = partial(_make, folder=folder, data=data, mesh=mesh, stop=stop, watch=watch)
    turned = (*recipe.runs[first:], *recipe.runs[:first])
    tuning = yield from _make_all(turned, make, stop)
    if len(tuning) < len(recipe.runs):  # it was stopped
        return
    finals = _finals(recipe, folder)
    if is_primary():
        index(finals)
    known = set(recipe.runs)
    yield from _make_all([c for c in finals if c not in known], make, stop)


def _finals(recipe: Recipe, folder: Path) -> tuple[RunConfig, ...]:
    """The final runs of what is best by the records, in which all processes see the same."""
    best = find_best([read_outcome(config, folder) for config in recipe.runs]).values()
    return recipe.finals([found.config for found in best if found.score is not None])


def _make_all(
    configs: Sequence[RunConfig], make: Callable[[RunConfig], Outcome], stop: Stop
) -> Generator[Outcome, None, list[Outcome]]:
    """Yields the runs as they end and returns them all, or fewer if it was asked to stop."""
    waiting, done = list(configs), []
    while waiting:
        taken = []
        for config in waiting:
            if some_process(stop())[0]:  # also: none goes on before all have ended the last run
                return done
            outcome = make(config)
            if outcome.state == "waiting":
                taken.append(config)
                continue
            yield outcome
            if outcome.state == "stopped":
                return done
            done.append(outcome)
        waiting = taken
        if waiting:  # others are at work on these
            time.sleep(POLL_SECONDS)
    return done


def _make(
    config: RunConfig, *, folder: Path, data: Any, mesh: Mesh | None, stop: Stop, watch: Watch
) -> Outcome:
    found = read_outcome(config, folder)
    if found.end is not None:
        return found
    try:
        rows = run(config, folder / found.name, data=data, mesh=mesh, resume=True, stop=stop)
        for row in rows:
            watch(config, row)
        some_process(False)  # all wait until the first has written its records
    except RunTaken:
        return found
    except Exception as error:  # whatever a task, an optimizer or a disk may raise
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
        _record_failure(folder / found.name, text)
        return found._replace(state="failed", error=text, fresh=True)
    ended = read_outcome(config, folder)
    if ended.end is not None:
        return ended._replace(fresh=True)
    if some_process(stop())[0]:
        return ended._replace(state="stopped", fresh=True)
    return ended._replace(state="failed", error="it ended without a record of that", fresh=True)


def _record_failure(folder: Path, error: str) -> None:
    try:
        records.append(folder / "records.jsonl", {"kind": "failed", "error": error})
    except OSError:  # which may be what failed in the first place
        pass


def _write_index(folder: Path, recipe: Recipe, part: bool, finals: Sequence[RunConfig]) -> None:
    ours = {config.label for config in recipe.runs}
    old = _read_index(folder) if part else {}
    stages = {"tuning": recipe.runs, "final": finals}
    content = {"recipe": recipe.name, **recipe.texts, "warnings": recipe.warnings()}
    for stage, configs in stages.items():
        others = {n: f for n, f in old.get(stage, {}).items() if f.get("label") not in ours}
        content[stage] = others | {name_of(config): to_fields(config) for config in configs}
    write_whole(folder / "sweep.json", json.dumps(content, indent=1).encode() + b"\n")


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "sweep.json").read_text("utf-8"))
    except (OSError, ValueError):  # none yet, or none that can be read
        return {}
