"""`celo2 sweep`: the runs of a recipe, and a table of the best."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Annotated

from celo2.commands.launch import ALONE, Launch, ending_together, start_mesh
from celo2.commands.meta_train import set_up_logging
from celo2.commands.run import Flat, as_table, say
from celo2.commands.signals import Asked, stop_on_signal
from celo2.evaluate import Recipe, describe, read_recipe, summarize
from celo2.evaluate import sweep as run_sweep
from celo2.evaluate.comparison import Outcome, data_caveats, read_sweep, unpack
from celo2.runs.address import search_working_directory
from celo2.runs.machine import cores
from celo2.runs.processes import is_primary

POLL_SECONDS = 0.5
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS")


def sweep(
    recipe: str,
    out: str | None = None,
    data: str | None = None,
    jobs: int = 1,
    accelerators: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    known: str | None = None,
    dry_run: bool = False,
    first: int = 0,
    report: bool = True,
    mesh: str | None = None,
    launch: Annotated[Launch, Flat] = ALONE,
) -> int:
    """Make the runs of a recipe and a page that compares them.

    Finished runs are skipped, broken ones resumed; the page is report.html in their folder.
    Ctrl-C and SIGTERM save first. A run that diverges or fails does not stop the others; if one
    failed, the exit status is 1.

    Args:
        recipe: a TOML file, such as recipes/quick.toml.
        out: the folder of the runs; by default runs/ and the recipe's name.
        data: folder of the data files; by default CELO2_DATA, else the cache folder.
        jobs: processes that share the runs, and the cores.
        accelerators: their numbers, each given to one of as many processes.
        also: further rules as LABEL=RULE, each tuned as the recipe tunes celo2.
        only: labels of the optimizers to run now, and to list; all by default.
        known: a packed file (`celo2 report --pack`) whose runs need not be made again.
        dry_run: only show what the runs would be; needs no data.
        first: the run to begin with.
        report: write the page at the end, if any run has ended.
        mesh: the devices that make each run together, such as data=4,model=2; see `celo2 run`.
        launch: processes and devices of that mesh.
    """
    search_working_directory()
    plan = choose(read_recipe(recipe, dict(map(split_label, also))), only)
    for warning in plan.warnings():
        say(f"warning: {warning}")
    if dry_run:
        show_plan(plan)
        return 0
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1.")
    if mesh is not None and (jobs > 1 or accelerators):
        raise ValueError(
            "--mesh puts every run on all devices: leave --jobs and --accelerators out."
        )
    set_up_logging()
    folder = Path(out) if out else Path("runs") / plan.name
    if known is not None:
        say(f"{unpack(known, folder)} runs taken from {known}")
    with stop_on_signal(say) as asked, ending_together():
        if jobs > 1 or accelerators:
            same = [recipe, "--out", str(folder), *(["--data", data] if data else [])]
            same += ["--also", *also] if also else []
            same += ["--only", *only] if only else []
            failed = _share(same, accelerators or ("",) * jobs, len(plan.runs), asked)
        else:
            devices_of_run = start_mesh(mesh, launch)
            outcomes = run_sweep(
                plan,
                folder,
                data=data,
                mesh=devices_of_run,
                first=first % len(plan.runs),
                part=bool(only),
                stop=asked,
            )
            failed = _show(outcomes, _count(plan))
    if is_primary():
        print(best_table(plan, folder))
        _compare(folder, report)
    return asked.status or int(failed)


def _show(outcomes: Iterable[Outcome], total: int) -> bool:
    """A line for each run as it ends; True if one failed."""
    failed = False
    for count, outcome in enumerate(outcomes, start=1):
        failed |= outcome.state == "failed"
        if is_primary():
            say(f"{count} of {total} {line(outcome)}")
    return failed


def split_label(text: str) -> tuple[str, str]:
    """A label and a rule.

    >>> split_label("mine=runs/mine/rule.safetensors")
    ('mine', 'runs/mine/rule.safetensors')
    """
    label, sign, rule = text.partition("=")
    if not (label and sign and rule):
        raise ValueError(f"--also {text!r} is not LABEL=RULE, as in mine=rule.safetensors.")
    return label, rule


def choose(plan: Recipe, labels: tuple[str, ...]) -> Recipe:
    """The recipe's runs of these optimizers; of all if there are none."""
    known = list(dict.fromkeys(str(config.label) for config in plan.runs))
    for label in labels:
        if label not in known:
            raise ValueError(f"--only {label!r} is not one of {', '.join(known)}.")
    chosen = labels or known
    return replace(plan, runs=tuple(c for c in plan.runs if c.label in chosen))


def _share(options: list[str], devices: tuple[str, ...], runs: int, asked: Asked) -> bool:
    """Makes the runs in as many processes as there are devices; True if one ended badly."""
    command = [sys.executable, "-m", "celo2.cli", "sweep", *options, "--no-report"]
    # Sessions of their own: Ctrl-C comes to us, and we pass it on once.
    workers = [
        subprocess.Popen(
            [*command, "--first", str(i * runs // len(devices))],
            env=_environment(device),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_on_cores(i, len(devices)),
        )
        for i, device in enumerate(devices)
    ]

    def stop_workers() -> None:
        for worker in workers:
            worker.terminate()

    asked.leave = stop_workers
    told = False
    while any(worker.poll() is None for worker in workers):
        if asked() and not told:
            told = True
            stop_workers()
        time.sleep(POLL_SECONDS)
    return any(worker.returncode for worker in workers)


def _environment(device: str) -> dict[str, str]:
    return dict(os.environ) | ({name: device for name in VISIBLE} if device else {})


def _on_cores(index: int, count: int) -> Callable[[], None] | None:
    """What gives a process its part of the cores; XLA makes as many threads as it may use."""
    if not hasattr(os, "sched_setaffinity") or cores() < count:
        return None
    mine = sorted(os.sched_getaffinity(0))[index::count]
    return lambda: os.sched_setaffinity(0, mine)


def show_plan(plan: Recipe) -> None:
    """Prints the recipe's texts, how many runs it has, and each optimizer's run on each task."""
    for name, text in plan.texts.items():
        print(f"{name:<16} {text}")
    for task, counts in plan.budgets().items():
        runs = ", ".join(f"{label} {count}" for label, count in counts.items())
        print(f"{'runs':<16} {task}: {runs}")
    seeds = ", ".join(map(str, plan.final_seeds)) or "none"
    print(f"{'final seeds':<16} {seeds}")
    shown = set()
    for config in plan.runs:
        if (config.task, config.label) not in shown:
            shown.add((config.task, config.label))
            print(f"\n{as_table(describe(config))}", flush=True)


def best_table(plan: Recipe, folder: Path) -> str:
    """The best run of each optimizer on each task, as far as the records go."""
    rows = [("task", "optimizer", "runs", "diverged", "rate", "decay", "best", "final seeds")]
    for (task, label), best in summarize(plan, folder).items():
        finals = [score for score in best.final_scores if score is not None]
        final = f"{mean(finals):.4f} of {len(finals)}" if finals else "-"
        rate, decay = f"{best.config.learning_rate:g}", f"{best.config.weight_decay:g}"
        score = "-" if best.score is None else f"{best.score:.4f}"
        rows.append((task, label, str(best.runs), str(best.diverged), rate, decay, score, final))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _compare(folder: Path, report: bool) -> None:
    """Says what cannot be compared, and writes the page."""
    try:
        found = read_sweep(folder)
    except FileNotFoundError:  # no run has ended
        return
    for caveat in data_caveats(found):
        say(f"warning: {caveat}")
    if report:
        from celo2.evaluate.report import write_page

        print(write_page(found, folder / "report.html"))


def line(outcome: Outcome) -> str:
    """One run that has ended."""
    if outcome.state == "failed":
        return f"{outcome.name}: failed, {outcome.error}"
    score = "" if outcome.score is None else f" {outcome.score:.4f}"
    when = "" if outcome.fresh else " (before)"
    return f"{outcome.name}: {outcome.state}{score}{when}"


def _count(plan: Recipe) -> int:
    """All runs of both stages, unless all of an optimizer's diverge."""
    seeds = set(plan.final_seeds) - {config.seed for config in plan.runs}
    return len(plan.runs) + len(seeds) * sum(len(row) for row in plan.budgets().values())
