"""`celo2 run`: one training run, with a progress bar."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import tyro

from celo2.commands.launch import ALONE, Launch, ending_together, start_mesh
from celo2.commands.meta_train import DIVERGED, STOPPED, set_up_logging
from celo2.commands.signals import stop_on_signal
from celo2.commands.trackers import tracked
from celo2.evaluate import RunConfig, describe
from celo2.evaluate import run as train
from celo2.evaluate.comparison import name_of
from celo2.evaluate.config import find_task, resolve
from celo2.runs.address import search_working_directory
from celo2.runs.fields import to_fields
from celo2.runs.processes import is_primary

Flat = tyro.conf.arg(name="")  # --learning-rate, not --config.learning-rate


def run(
    config: Annotated[RunConfig, Flat],
    out: str | None = None,
    data: str | None = None,
    resume: bool = False,
    dry_run: bool = False,
    checkpoint_every: int | None = None,
    keep: bool = False,
    tensorboard: bool = False,
    wandb: bool = False,
    mesh: str | None = None,
    launch: Annotated[Launch, Flat] = ALONE,
) -> int:
    """Train a task with an optimizer and record how it goes.

    Ctrl-C and SIGTERM save first (exit status 130 and 143), a second one ends at once; a run that
    diverged has status 3.

    Args:
        config: the run.
        out: the run's folder; by default runs/ and a name made from the options.
        data: folder of the data files; by default CELO2_DATA, else the cache folder.
        resume: continue where there is a checkpoint, else start over.
        dry_run: only show what the run would be; needs no data.
        checkpoint_every: steps between checkpoints; by default as many as take 5 minutes.
        keep: leave the last checkpoint of a finished run where it is.
        tensorboard: write the records' numbers to the folder's tensorboard too.
        wandb: send them to the project celo2 of Weights & Biases too.
        mesh: how many devices share the batch and the parameters, and how many each layer, such as
            data=4,model=2; by default one device, or all on data if there are several processes.
        launch: processes and devices; by default as many CPU devices as the mesh needs.
    """
    search_working_directory()
    config = resolve(config)
    if dry_run:
        print(as_table(describe(config)))
        return 0
    set_up_logging()
    devices = start_mesh(mesh, launch)
    folder = Path(out) if out else Path("runs") / name_of(config)
    with stop_on_signal(say) as asked, ending_together():
        rows = train(
            config,
            folder,
            data=data,
            mesh=devices,
            resume=resume,
            checkpoint_every=checkpoint_every,
            keep=keep,
            stop=asked,
        )
        if is_primary():
            rows = tracked(
                rows, folder, to_fields(config), to_tensorboard=tensorboard, to_wandb=wandb
            )
        *_, last = show(rows, config) if is_primary() else rows
    if last["kind"] != "end":
        say(f"stopped; continue with --resume --out {folder}")
        return asked.status or STOPPED
    if is_primary():
        say(f"{summary(last)}; records in {folder}")
    return DIVERGED if last["diverged"] else 0


def show(rows: Iterable[dict[str, Any]], config: RunConfig) -> Iterator[dict[str, Any]]:
    """Draws a bar from the rows: the metric in training, its newest validation, time left."""
    from tqdm import tqdm

    interval = 0.5 if sys.stderr.isatty() else 30
    told: dict[str, str] = {}
    metric = find_task(config.task).metric
    bar = tqdm(total=config.steps, unit="step", mininterval=interval, dynamic_ncols=True)
    with bar:
        for row in rows:
            if row["kind"] in ("train", "valid"):
                value = row["metrics"].get(metric)
                told[row["kind"]] = "-" if value is None else f"{value:.4f}"
                bar.set_postfix(told, refresh=False)
            if "step" in row:
                bar.update(row["step"] - bar.n)
            yield row


def summary(end: dict[str, Any]) -> str:
    """A finished run in a line."""
    speed = f"{1000 * end['seconds_per_step']:.2f} ms a step"
    if end["diverged"]:
        return f"diverged at step {end['step']}, {speed}"
    metrics = ", ".join(f"{name} {value}" for name, value in end["metrics"].items())
    return f"step {end['step']}: validation {metrics}; {speed}"


def as_table(facts: dict[str, Any]) -> str:
    """What a run would be, in lines."""
    count, state = facts["parameters"], facts["state_bytes"]
    by_group = ", ".join(f"{v:,} {k}" for k, v in facts["parameters_by_group"].items())
    rates = ", ".join(f"{rate:g} at {update}" for update, rate in facts["rates"].items())
    lines = {
        "run": f"{facts['task']} with {facts['optimizer']}",
        "parameters": f"{count:,} in {facts['tensors']} tensors ({by_group})",
        "parameter bytes": f"{facts['parameter_bytes']:,}",
        "optimizer bytes": f"{state:,} ({state / max(count, 1):.2f} a parameter)",
        "steps": f"{facts['steps']:,} ({facts['updates']:,} updates)",
        "tokens": "-" if facts["tokens"] is None else f"{facts['tokens']:,}",
        "learning rate": rates,
        "validation": ", ".join(facts["metrics"]),
    }
    return "\n".join(f"{name:<16} {text}" for name, text in lines.items())


def say(text: str) -> None:
    print(f"celo2: {text}", file=sys.stderr, flush=True)
