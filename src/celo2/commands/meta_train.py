"""`celo2 meta-train` and `celo2 status`: meta-training a rule, and its progress."""

import argparse
import json as jsonlib
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from celo2.commands.progress import Flat, progress_bar, say, set_up_logging, tracked
from celo2.evaluate.validation import describe_score
from celo2.metatrain import PRESETS, Diverged, Limits, MetaConfig, metatrain
from celo2.metatrain import status as read_status
from celo2.metatrain.config import from_fields, read_toml
from celo2.metatrain.families import count_problems
from celo2.metatrain.heldout import trained_on
from celo2.metatrain.loop import HELDOUT
from celo2.runs.fields import search_working_directory, to_fields
from celo2.runs.folder import RunFolder
from celo2.runs.processes import (
    DIVERGED,
    STOPPED,
    Launch,
    cores,
    exit_if_lost,
    is_primary,
    largest_divisor,
    start_devices,
    stop_on_signal,
)
from celo2.runs.records import Row


@dataclass(frozen=True)
class Options:
    """Meta-train a rule.

    Without image sets in the data folder, the inner problems are on scikit-learn's digits. Ctrl-C
    and SIGTERM save a checkpoint and stop (exit status 130 and 143); a second one stops at
    once. A run that diverged has exit status 3.

    Args:
        out: folder for the run.
        meta: what is learned, from which problems and how.
        preset: config of the paper to start from; --config and the other options override its
            fields.
        config: TOML file with fields of the config; overrides --preset and is overridden by
            options.
        families: names of the families of inner problems, with their usual settings; for others
            use [[families]] in --config.
        resume: continue from the newest checkpoint; starts from the beginning if there is none.
        minutes: save and stop after this many minutes; None: run to the last iteration.
        init_from: rule to start a new run from: a file, the name of a shipped rule or an hf://
            address; None: see --start.
        checkpoint_every: iterations between checkpoints; None: about 5 minutes between them.
        data: folder of the image sets; None: CELO2_DATA if that is set, else the cache folder.
        launch: processes and devices; None: a CPU device for each core that can share the problems,
            or 1 if there are several processes.
        try_every: iterations between tries on held-out problems (`celo2 try`), which run in a
            process of their own; 0: no tries.
        try_size: suite of held-out problems; None: full if the data folder has the images, else
            quick.
        patience: number of failing iterations in a row after which the run is stopped as diverged.
        max_weight_norm: norm of the rule's weights above which the run is stopped as diverged.
        tensorboard: also write the records to the folder tensorboard/ of the run.
        wandb: also send the records to Weights & Biases, project celo2.
    """

    out: str
    meta: Annotated[MetaConfig, Flat]
    preset: Literal["celo2", "celo2-base"] = "celo2"
    config: str | None = None
    families: tuple[str, ...] = ()
    resume: bool = False
    minutes: float | None = None
    init_from: str | None = None
    checkpoint_every: int | None = None
    data: str | None = None
    try_every: int = 2000
    try_size: Literal["quick", "full"] | None = None
    patience: int = 100
    max_weight_norm: float = 1e3
    tensorboard: bool = False
    wandb: bool = False
    launch: Annotated[Launch, Flat] = Launch()


def meta_train(arguments: list[str]) -> int:
    """Runs the command and gives its exit status."""
    options = parse_options(arguments)
    search_working_directory()
    set_up_logging()
    start_devices(options.launch, default_devices(options))
    with stop_on_signal(say if is_primary() else lambda text: None) as asked, exit_if_lost():
        rows = metatrain(
            options.meta,
            options.out,
            data=options.data,
            resume=options.resume,
            init_from=options.init_from,
            minutes=options.minutes,
            checkpoint_every=options.checkpoint_every,
            try_command=try_command(options),
            try_every=options.try_every or 1,
            limits=Limits(options.max_weight_norm, options.patience),
            stop=asked,
        )
        if is_primary():
            rows = tracked(
                rows,
                Path(options.out),
                to_fields(options.meta),
                to_tensorboard=options.tensorboard,
                to_wandb=options.wandb,
            )
            rows = show_meta_run(rows, options.meta.iterations)
        try:
            *_, end = rows
        except Diverged as error:
            say(str(error))
            return DIVERGED
    # A signal to one process stops all; the others are stopped as by a SIGTERM of their own.
    return (asked.status or STOPPED) if end["reason"] == "stopped" else 0


def parse_options(arguments: list[str]) -> Options:
    """The options; fields of the config come from the command line, else from --config, else from
    --preset. A resumed run that names neither starts from its own config."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset")
    first.add_argument("--config")
    first.add_argument("--out")
    first.add_argument("--resume", action="store_true")
    known, _ = first.parse_known_args(arguments)
    base = PRESETS.get(known.preset or "celo2", PRESETS["celo2"])
    if known.config:
        base = read_toml(known.config, base)
    elif known.resume and known.out and not known.preset:
        stored = RunFolder(Path(known.out)).read_config()
        base = from_fields(stored["config"]) if stored else base
    default = Options(out=tyro.MISSING, meta=base)
    options = tyro.cli(Options, prog="celo2 meta-train", args=arguments, default=default)
    if not options.families:
        return options
    if known.config and base.families:
        raise ValueError(
            f"--families {' '.join(options.families)} would replace the [[families]] of "
            f"{known.config}, with their settings: use one of the two."
        )
    return replace(options, meta=from_fields({"families": options.families}, options.meta))


def default_devices(options: Options) -> int:
    """As many CPU devices as cores can share the problems."""
    if options.launch.several:
        return 1
    return largest_divisor(math.gcd(*count_problems(options.meta, options.data)), cores())


def try_command(options: Options) -> list[str] | None:
    """The command that tries a rule file; None for a run without tries."""
    if options.try_every < 0:
        raise ValueError(f"try_every={options.try_every} must not be negative; 0 never tries.")
    if options.try_every == 0:
        return None
    command = [sys.executable, "-m", "celo2.cli", "try", "--json"]
    command += ["--out", str(Path(options.out) / HELDOUT)]
    command += ["--data", options.data] if options.data else []
    return command + (["--size", options.try_size] if options.try_size else [])


def show_meta_run(rows: Iterable[Row], total: int) -> Iterator[Row]:
    """Shows a progress bar with meta-loss, inner steps per second and time left."""
    rows = iter(rows)
    start = next(rows)  # before the bar: a run that is refused draws none
    say(_start_line(start))
    yield start
    warned = False
    with progress_bar(total, "it", start["iteration"]) as bar:
        for row in rows:
            iteration = row["iteration"]
            if row["kind"] == "train":
                rate = f"{row['inner_steps_per_second']:,.0f}"
                bar.set_postfix({"loss": row["loss"], "inner steps/s": rate}, refresh=False)
                bar.update(iteration - bar.n)
            elif row["kind"] == "end":
                bar.close()
                say(f"iteration {iteration} of {total}: {row['reason']}")
            else:
                text = row.get("cause") or heldout_line(row)
                bar.write(f"iteration {iteration}: {text}", file=sys.stderr)
            if row["kind"] == "heldout" and not warned:
                warned = True
                if seen := trained_on(row.get("problems", {}), start["data"]):
                    bar.write(_seen_line(seen), file=sys.stderr)
            yield row


def heldout_line(row: Row) -> str:
    """The score of a rule on held-out problems, against each baseline where there are several."""
    scores = {f" against {name}": found for name, found in row.get("against", {}).items()}
    parts = (describe_score(found) + name for name, found in (scores or {"": row}).items())
    return f"held-out score {', '.join(parts)}"


def _start_line(row: Row) -> str:
    verb = "continuing at" if row["iteration"] else "starting at"
    devices = f"{row['devices']} {row['platform']} device{'s' * (row['devices'] > 1)}"
    return (
        f"{verb} iteration {row['iteration']} on {', '.join(row['data'])}, {devices}; "
        "compiling first"
    )


def _seen_line(seen: list[str]) -> str:
    return (
        f"celo2: the rule learns on the same images as {', '.join(seen)}: these are not held out, "
        "and the score flatters it"
    )


def status(run: str, json: bool = False) -> None:
    """Show the progress and losses of a meta-training run, and a digest of its newest checkpoint.

    Changes nothing. Runs with equal digests have the same state, config and data.

    Args:
        run: folder of the run.
        json: print one JSON object instead of a table.
    """
    # The run may be using this machine's accelerator; reading needs none.
    jax.config.update("jax_platforms", "cpu")
    facts = read_status(run)
    print(jsonlib.dumps(facts, indent=2) if json else status_table(facts))


def status_table(facts: dict[str, Any]) -> str:
    """The status as lines of text."""
    process = facts["process"] or {}
    where = f", process {process.get('pid')} on {process.get('host')}" if process else ""
    rate, best, seconds = facts["inner_steps_per_second"], facts["best"], facts["seconds_left"]
    left = "?" if seconds is None else f"{seconds / 3600:.2f} h"
    losses = ", ".join(f"{name} {loss}" for name, loss in facts["family_loss"].items())
    lines = {
        "run": facts["run"],
        "state": facts["state"] + where,
        "iteration": f"{facts['iteration']} of {facts['iterations']}",
        "meta-loss": f"{facts['loss']} ({losses})" if losses else "none yet",
        "time": f"{facts['elapsed'] / 3600:.2f} h, about {left} left",
        "rate": f"{rate:,.0f} inner steps/s" if rate else "none yet",
        "checkpoints": ", ".join(map(str, facts["checkpoints"])) or "none yet",
        "best": f"held-out score {best['score']:.4f} at iteration {best['iteration']}"
        if best
        else "none yet",
        "digest": facts["digest"] or "none yet",
    }
    for damaged, cause in facts["damaged"].items():
        lines[f"damaged {damaged}"] = cause
    for row in facts["warnings"][-5:]:
        lines[f"warning {row['iteration']}"] = row["cause"]
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())
