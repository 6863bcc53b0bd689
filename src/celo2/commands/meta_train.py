"""`celo2 meta-train`: a run from the command line, with a progress bar."""

import argparse
import logging
import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

from celo2.commands import trackers
from celo2.commands.launch import Launch, ending_together, start_devices
from celo2.commands.signals import Asked, stop_on_signal
from celo2.metatrain import PRESETS, Diverged, Limits, MetaConfig, heldout, metatrain
from celo2.metatrain.config import from_fields, read_toml
from celo2.metatrain.families import count_problems
from celo2.rule import Rule
from celo2.runs.address import search_working_directory
from celo2.runs.fields import to_fields
from celo2.runs.folder import RunFolder
from celo2.runs.machine import cores
from celo2.runs.processes import some_process

DIVERGED = 3  # exit status
STOPPED = 128 + signal.SIGTERM  # the same, of a process that another one's signal stopped
Flat = tyro.conf.arg(name="")  # --learning-rate, not --meta.learning-rate


@dataclass(frozen=True)
class Options:
    """Meta-train a rule.

    Without image sets at hand it trains on scikit-learn's digits. Ctrl-C and SIGTERM save first
    (exit status 130 and 143), a second one ends at once; a run that diverged has status 3.

    Args:
        out: the run's folder.
        meta: the config.
        preset: the config to start from; options below change single fields of it.
        config: a TOML file whose fields come before the preset's; options come before both.
        resume: continue where there is a checkpoint, else start.
        minutes: save and stop after that long.
        init_from: the rule a new run starts from: a file, a shipped name or an hf:// address.
        checkpoint_every: iterations between checkpoints; by default as many as take 5 minutes.
        data: folder of the image sets; by default CELO2_DATA, else the cache folder.
        launch: processes and devices; by default a CPU device for each core that can share the
            problems, or 1 if there are several processes.
        try_every: iterations between tries on held-out problems; 0 never tries.
        try_size: how long those tries are.
        patience: iterations in a row that may go wrong before a run is given up.
        max_weight_norm: norm of the rule's weights above which a run is given up.
        tensorboard: write to RUN_DIR/tensorboard too.
        wandb: send to Weights & Biases too.
    """

    out: str
    meta: Annotated[MetaConfig, Flat]
    preset: Literal["celo2", "celo2-base"] = "celo2"
    config: str | None = None
    resume: bool = False
    minutes: float | None = None
    init_from: str | None = None
    checkpoint_every: int | None = None
    data: str | None = None
    try_every: int = 2000
    try_size: Literal["quick", "full"] = "full"
    patience: int = 100
    max_weight_norm: float = 1e3
    tensorboard: bool = False
    wandb: bool = False
    launch: Annotated[Launch, Flat] = Launch()


def main(arguments: list[str]) -> int:
    """Runs the command and gives its exit status."""
    options = parse(arguments)
    search_working_directory()
    set_up_logging()
    start_devices(options.launch, default_devices(options))
    primary = jax.process_index() == 0
    quiet = _say if primary else lambda text: None
    with stop_on_signal(quiet) as asked, ending_together():
        rows = _train(options, asked)
        try:
            *_, end = _show(rows, options.meta.iterations) if primary else rows
        except Diverged as error:
            _say(str(error))
            return DIVERGED
    # A signal to one process stops all; the others are stopped as by a SIGTERM of their own.
    return (asked.status or STOPPED) if end["reason"] == "stopped" else 0


def parse(arguments: list[str]) -> Options:
    """The options; fields of the config come from the command line, else from --config, else from
    --preset. A resumed run that names neither starts from its own config."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset")
    first.add_argument("--config")
    first.add_argument("--out")
    first.add_argument("--resume", action="store_true")
    first.add_argument("--families", nargs="+")
    known, _ = first.parse_known_args(arguments)
    base = PRESETS.get(known.preset or "celo2", PRESETS["celo2"])
    if known.config:
        base = read_toml(known.config, base)
    elif known.resume and known.out and not known.preset:
        stored = RunFolder(Path(known.out)).read_config()
        base = from_fields(stored["config"]) if stored else base
    if known.families:
        base = from_fields({"families": known.families}, base)
        arguments = _without(arguments, "--families", len(known.families))
    default = Options(out=tyro.MISSING, meta=base)
    return tyro.cli(Options, prog="celo2 meta-train", args=arguments, default=default)


def _without(arguments: list[str], option: str, values: int) -> list[str]:
    """The arguments without an option and its values, which tyro does not know."""
    place = arguments.index(option)
    return arguments[:place] + arguments[place + 1 + values :]


def set_up_logging() -> None:
    """Our own messages as lines of the command, and none of orbax, which logs tracebacks."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("celo2: %(message)s"))
    ours = logging.getLogger("celo2")
    ours.handlers, ours.propagate = [handler], False
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def default_devices(options: Options) -> int:
    """As many CPU devices as cores can share the problems."""
    if options.launch.several:
        return 1
    return largest_divisor(math.gcd(*count_problems(options.meta, options.data)), cores())


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` up to `limit`."""
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def _train(options: Options, asked: Asked) -> Iterator[dict[str, Any]]:
    rows = metatrain(
        options.meta,
        options.out,
        data=options.data,
        resume=options.resume,
        init_from=options.init_from,
        minutes=options.minutes,
        checkpoint_every=options.checkpoint_every,
        try_rule=_held_out(options, asked),
        try_every=max(options.try_every, 1),
        limits=Limits(options.max_weight_norm, options.patience),
        stop=asked,
    )
    if jax.process_index() != 0:
        return rows
    return trackers.tracked(
        rows,
        Path(options.out),
        to_fields(options.meta),
        to_tensorboard=options.tensorboard,
        to_wandb=options.wandb,
    )


def _held_out(options: Options, asked: Asked) -> Callable[[Rule], dict[str, Any] | None] | None:
    if options.try_every < 1:
        return None

    def stop() -> bool:
        return some_process(asked())[0]

    return lambda rule: heldout.try_rule(rule, heldout.problems(size=options.try_size), stop)


def _show(rows: Iterable[dict[str, Any]], total: int) -> Iterator[dict[str, Any]]:
    """Draws a bar from the rows: meta-loss, inner steps per second, time left."""
    from tqdm import tqdm

    rows = iter(rows)
    start = next(rows)  # before the bar: a run that is refused draws none
    _say(_start_line(start))
    yield start
    told = False
    interval = 0.5 if sys.stderr.isatty() else 30
    bar = tqdm(
        initial=start["iteration"],
        total=total,
        unit="it",
        mininterval=interval,
        dynamic_ncols=True,
    )
    with bar:
        for row in rows:
            iteration = row["iteration"]
            if row["kind"] == "train":
                rate = f"{row['inner_steps_per_second']:,.0f}"
                bar.set_postfix({"loss": row["loss"], "inner steps/s": rate}, refresh=False)
                bar.update(iteration - bar.n)
            elif row["kind"] == "end":
                bar.close()
                _say(f"iteration {iteration} of {total}: {row['reason']}")
            else:
                text = row.get("cause") or f"held-out score {row.get('score')}"
                bar.write(f"iteration {iteration}: {text}", file=sys.stderr)
            if row["kind"] == "heldout" and not told:
                told = True
                if seen := heldout.seen(row.get("problems", {}), start["data"]):
                    bar.write(_seen_line(seen), file=sys.stderr)
            yield row


def _start_line(row: dict[str, Any]) -> str:
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


def _say(text: str) -> None:
    print(f"celo2: {text}", file=sys.stderr, flush=True)
