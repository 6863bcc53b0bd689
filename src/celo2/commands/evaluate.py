"""`celo2 run`, `sweep`, `report`, `plot` and `try`: training runs, their tables and figures."""

import json as jsonlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from celo2.commands.progress import Flat, progress_bar, say, set_up_logging, tracked
from celo2.evaluate import Recipe, RunConfig, describe, read_recipe
from celo2.evaluate import run as train
from celo2.evaluate import sweep as run_sweep
from celo2.evaluate.comparison import (
    Outcome,
    as_text,
    data_caveats,
    is_sweep,
    name_of,
    read_packed,
    read_sweep,
    score_table,
    unpack,
)
from celo2.evaluate.comparison import pack as write_packed
from celo2.evaluate.config import find_task, resolve
from celo2.evaluate.recipe import choose, count_all_runs, split_label
from celo2.evaluate.sweeps import MadeRule, make_rules, share_sweep, without_missing
from celo2.runs.fields import search_working_directory, to_fields
from celo2.runs.folder import RunFolder, locked
from celo2.runs.processes import (
    ALONE,
    DIVERGED,
    STOPPED,
    Launch,
    exit_if_lost,
    is_primary,
    start_mesh,
    stop_on_signal,
)
from celo2.runs.records import Row


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
    """Train a task with an optimizer and record losses and costs.

    Ctrl-C and SIGTERM save a checkpoint and stop (exit status 130 and 143); a second one stops
    at once. A run that diverged has exit status 3.

    Args:
        config: task, optimizer and their settings.
        out: folder for the run; None: runs/ plus a name made from the options.
        data: folder of the data files; None: CELO2_DATA if that is set, else the cache folder.
        resume: continue from the newest checkpoint; starts from the beginning if there is none.
        dry_run: describe the run and exit; needs no data.
        checkpoint_every: steps between checkpoints; None: about 5 minutes between them.
        keep: keep the last checkpoint after the run has finished.
        tensorboard: also write the records to the folder tensorboard/ of the run.
        wandb: also send the records to Weights & Biases, project celo2.
        mesh: device mesh, such as data=4,model=2 (data: batch, parameters; model: each layer).
            None: one device; all devices along data if there are several processes.
        launch: processes and devices; None: as many CPU devices as the mesh needs.
    """
    search_working_directory()
    config = resolve(config)
    if dry_run:
        print(describe_run(describe(config)))
        return 0
    set_up_logging()
    devices = start_mesh(mesh, launch)
    folder = Path(out) if out else Path("runs") / name_of(config)
    with stop_on_signal(say) as asked, exit_if_lost():
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
            fields = to_fields(config)
            rows = tracked(rows, folder, fields, to_tensorboard=tensorboard, to_wandb=wandb)
            rows = show_run(rows, config)
        *_, last = rows
    if last["kind"] != "end":
        say(f"stopped; continue with --resume --out {folder}")
        return asked.status or STOPPED
    if is_primary():
        say(f"{summary(last)}; records in {folder}")
    return DIVERGED if last["diverged"] else 0


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
    """Run every training run of a recipe and write a page that compares them.

    Rules that the recipe trains come first. Finished runs are skipped and interrupted ones
    resumed; the page is report.html in their folder. Ctrl-C and SIGTERM save a checkpoint and
    stop. A run that diverges or fails does not stop the others; the exit status is 1 if one failed.

    Args:
        recipe: recipe to run, a TOML file such as recipes/quick.toml.
        out: folder for the runs and the page; None: runs/ plus the recipe's name.
        data: folder of the data files; None: CELO2_DATA if that is set, else the cache folder.
        jobs: number of processes that share the runs and the CPU cores.
        accelerators: numbers of the accelerators to use, such as 0 1 2, with one process on each.
        also: further rules: LABEL=RULE is tuned as celo2 is; velo=FILE and celo=FILE are not tuned.
        only: labels of the optimizers to run and list (all if none is given).
        known: packed file (`celo2 report --pack`) from which to take finished runs.
        dry_run: describe the runs and exit; needs no data.
        first: position of the run to start with; those before it are run last.
        report: write report.html at the end if any run has finished.
        mesh: device mesh of every run, such as data=4,model=2; see `celo2 run --help`.
        launch: processes and devices of the mesh.
    """
    search_working_directory()
    plan = choose(read_recipe(recipe, dict(map(split_label, also)), out), only)
    for warning in plan.warnings():
        say(f"warning: {warning}")
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1.")
    if mesh is not None and (jobs > 1 or accelerators):
        raise ValueError(
            "--mesh puts every run on all devices: leave --jobs and --accelerators out."
        )
    if dry_run:
        if known is not None:
            say(f"{known} has {len(read_packed(known)[1])} runs")
        show_plan(plan)
        return 0
    set_up_logging()
    folder = Path(out) if out else Path("runs") / plan.name
    if known is not None:
        say(f"{unpack(known, folder)} runs taken from {known}")
    outcomes: list[Outcome] = []
    with stop_on_signal(say) as asked, exit_if_lost():
        if jobs > 1 or accelerators:
            same = [recipe, "--out", str(folder), *(["--data", data] if data else [])]
            same += ["--also", *also] if also else []
            same += ["--only", *only] if only else []
            failed = share_sweep(same, accelerators or ("",) * jobs, len(plan.runs), asked)
        else:
            devices = start_mesh(mesh, launch)
            begin = first * len(plan.rules) // len(plan.runs)
            rules = make_rules(plan.rules, data=data, first=begin, stop=asked)
            ready = without_missing(plan, show_rules(rules, len(plan.rules)))
            if ready.runs and not asked():
                made = run_sweep(
                    ready,
                    folder,
                    data=data,
                    mesh=devices,
                    first=first % len(ready.runs),
                    part=bool(only),
                    stop=asked,
                )
                outcomes = list(show_outcomes(made, count_all_runs(ready)))
            failed = ready != plan or any(run.error is not None for run in outcomes)
    if is_primary():
        show_comparison(folder, outcomes, only, report)
    return asked.status or int(failed)


def show_rules(rules: Iterable[MadeRule], total: int) -> Iterator[MadeRule]:
    """Prints a line for each rule of a recipe as it is trained."""
    for count, made in enumerate(rules, start=1):
        if is_primary():
            say(f"rule {count} of {total} {made.rule.file}: {made.error or 'is there'}")
        yield made


def show_comparison(
    folder: Path, outcomes: Iterable[Outcome], labels: tuple[str, ...], report: bool
) -> None:
    """Prints the best of each optimizer and what cannot be compared, and writes the page."""
    try:
        found = read_sweep(folder, {run.name: run.rows for run in outcomes})
    except FileNotFoundError:  # no run has ended
        return
    for task, entries in found.tasks.items():
        head, *rows = score_table(entries)
        chosen = [row for row in rows if row[0] in labels or not labels]
        print(f"{task}\n{as_text([head, *chosen])}\n" if chosen else "", end="")
    for caveat in data_caveats(found):
        say(f"warning: {caveat}")
    if report:
        from celo2.evaluate.report import write_page

        print(write_page(found, folder / "report.html"))


def show_outcomes(outcomes: Iterable[Outcome], total: int) -> Iterator[Outcome]:
    """Prints a line for each run as it ends."""
    for count, outcome in enumerate(outcomes, start=1):
        if is_primary():
            say(f"{count} of {total} {outcome_line(outcome)}")
        yield outcome


def outcome_line(outcome: Outcome) -> str:
    """A run that has ended, in a line."""
    if outcome.error is not None:
        return f"{outcome.name}: failed, {outcome.error}"
    score = "" if outcome.score is None else f" {outcome.score:.4f}"
    when = "" if outcome.fresh else " (before)"
    return f"{outcome.name}: {outcome.state}{score}{when}"


def show_plan(plan: Recipe) -> None:
    """Prints the recipe's texts, how many runs it has, and each optimizer's run on each task."""
    for name, text in plan.texts.items():
        print(f"{name:<16} {text}")
    for folder, rule in {rule.folder: rule for rule in plan.rules}.items():
        print(f"{'rule':<16} {folder}: {rule.config.iterations:,} iterations of meta-training")
    for task, counts in plan.budgets().items():
        runs = ", ".join(f"{label} {count}" for label, count in counts.items())
        print(f"{'runs':<16} {task}: {runs}")
    seeds = ", ".join(map(str, plan.final_seeds)) or "none"
    print(f"{'final seeds':<16} {seeds}")
    shown = {(config.task, config.label): config for config in reversed(plan.runs)}
    for config in reversed(shown.values()):
        print(f"\n{describe_run(describe(config))}", flush=True)


def try_rule(
    rule: str,
    size: Literal["quick", "full"] | None = None,
    against: str = "adamw,muon",
    adam_multiplier: float | None = None,
    data: str | None = None,
    out: str | None = None,
    known: str | None = None,
    json: bool = False,
) -> int:
    """Train small models with a rule, each at several learning rates, and compare their losses.

    Every optimizer is tuned over the same number of rates, and its best rate is run with several
    seeds. The score against another optimizer is the mean of log(loss / its loss) over tasks and
    seeds, with a standard error; negative is better.

    Args:
        rule: a rule file (.safetensors), the name of a shipped rule or an hf:// address.
        size: suite of problems: full has six small tasks on real data, quick needs no data files.
            None: full if the data folder has the images, else quick.
        against: optimizers to compare with, separated by commas: adamw, muon or rules.
        adam_multiplier: Adam's rate beside each rule, as a multiple of the rule's rate; None: 5.
        data: folder of the data files; None: CELO2_DATA if that is set, else the cache folder.
        out: folder for the runs; finished ones are reused. None: runs/try-full or runs/try-quick.
        known: packed file (`celo2 report --pack`) from which to take finished runs.
        json: print one JSON object with the loss at every learning rate instead of a table.
    """
    from celo2.evaluate import validation

    set_up_logging()
    size = size or validation.default_size(data)
    others = [name.strip() for name in against.split(",") if name.strip()]
    plan = validation.validation_recipe(
        list(dict.fromkeys((rule, *others))), size, data=data, adam_multiplier=adam_multiplier
    )
    folder = RunFolder(Path(out) if out else Path("runs") / f"try-{size}")
    if known is not None:
        say(f"{unpack(known, folder.path)} runs taken from {known}")
    say(f"the {size} suite, {count_all_runs(plan)} runs in {folder.path}")
    with stop_on_signal(say) as asked, locked(folder):
        made = run_sweep(plan, folder.path, data=data, stop=asked)
        outcomes = list(show_outcomes(made, count_all_runs(plan)))
    if asked():
        return asked.status
    found = {"size": size, **validation.judge(plan, outcomes, rule)}
    print(jsonlib.dumps(found, indent=2) if json else validation.as_table(found))
    return 0


def report(sweep: str, out: str | None = None, pack: str | None = None) -> None:
    """Write a sweep's tables, figures and caveats as a single HTML file that needs no other file.

    Args:
        sweep: folder of a sweep's runs, or a packed file of them; only records are read.
        out: file to write; None: report.html in the folder, or the packed file's name with .html.
        pack: also write the records to this packed file, keeping 16 training rows of each run.
    """
    from celo2.evaluate.report import write_page

    search_working_directory()
    found = read_sweep(sweep)
    if pack is not None:
        print(f"{pack}: {write_packed(found, pack)} runs")
    home = Path(sweep)
    default = home / "report.html" if home.is_dir() else home.with_suffix(".html")
    print(write_page(found, default if out is None else out))


def plot(run: str, out: str | None = None) -> None:
    """Draw the figures of a meta-training run or of a sweep, from their records.

    For a meta-training run: the meta-loss, the held-out problems and the rule's first layer. For
    each task of a sweep: curves, learning rates, all settings, and the RMS of updates and
    parameters; one more figure for tasks that differ in size, and one for several seeds.

    Args:
        run: folder of a meta-training run or of a sweep's runs, or a packed file of a sweep.
        out: folder for the figures; None: the run's own, or figures/ beside the sweep's records.
    """
    from celo2.evaluate.plots import plot_sweep
    from celo2.metatrain.plots import plot_run

    search_working_directory()
    for path in plot_sweep(run, out) if is_sweep(run) else plot_run(run, out):
        print(path)


def show_run(rows: Iterable[Row], config: RunConfig) -> Iterator[Row]:
    """Draws a bar from the rows: the metric in training, its newest validation, time left."""
    values: dict[str, str] = {}
    metric = find_task(config.task).metric
    with progress_bar(config.steps, "step") as bar:
        for row in rows:
            if row["kind"] in ("train", "valid"):
                value = row["metrics"].get(metric)
                values[row["kind"]] = "-" if value is None else f"{value:.4f}"
                bar.set_postfix(values, refresh=False)
            if "step" in row:
                bar.update(row["step"] - bar.n)
            yield row


def summary(end: Row) -> str:
    """A finished run in a line."""
    speed = f"{1000 * end['seconds_per_step']:.2f} ms a step"
    if end["diverged"]:
        return f"diverged at step {end['step']}, {speed}"
    metrics = ", ".join(f"{name} {value}" for name, value in end["metrics"].items())
    return f"step {end['step']}: validation {metrics}; {speed}"


def describe_run(facts: dict[str, Any]) -> str:
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
