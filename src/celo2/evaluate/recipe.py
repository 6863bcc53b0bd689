"""Recipes: a TOML file that says which runs make a comparison.

    command = "celo2 sweep recipes/NAME.toml --out runs/NAME"   # text fields, shown to people
    cost = "…"
    expect = "…"
    seeds = [0]             # of the tuning runs
    final_seeds = [0, 1]    # the best run of each optimizer, again with each of these

    [run]                   # fields of RunConfig for all runs
    schedule = "cosine"

    [tasks.text-tiny]       # one table for each task, with its own fields
    steps = 300

    [optimizers.celo2]      # one for each optimizer, by its label
    optimizer = "celo2"     # the label itself by default
    learning_rates = [1e-3, 2e-3]                             # or:
    learning_rates = { low = 1e-4, high = 1e-2, count = 5 }   # log-spaced, three digits
    weight_decays = [0.0]

    [optimizers.celo2.tasks.text-tiny]                        # on one task only
    learning_rates = [2e-3, 4e-3]

    [meta_train]            # for rules that the recipe trains itself, before its runs:
    preset = "celo2-base"   # the config to start from, and fields of MetaConfig for all of them
    iterations = 5000

    [optimizers.wide]       # one that uses such a rule; equal ones are trained once
    meta_train = { rule = { hidden = [32, 32] } }             # fields of its own
    at_test = { orthogonalize = true }                        # of the rule, changed afterwards
    learning_rates = [1e-3, 2e-3]

Fields of an optimizer on a task override those of the optimizer, these those of the task, and these
those of [run].
"""

import itertools
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from celo2.evaluate.config import RunConfig, config_from_fields, resolve, uses_lstm
from celo2.metatrain.config import PRESETS, MetaConfig, from_fields
from celo2.metatrain.loop import RULE
from celo2.rule import RuleConfig
from celo2.runs.checkpoint import digest_json
from celo2.runs.fields import differences, replace_fields
from celo2.runs.records import Row

TEXTS = ("command", "cost", "expect")
KEYS = (*TEXTS, "seeds", "final_seeds", "run", "meta_train", "tasks", "optimizers")
RULES = "rules"  # in a sweep's folder, the rules that it trains
NAME_LENGTH = 80  # of a rule's folder
MODEL = "celo2"  # whose learning rates further rules are given
AS_PUBLISHED = {"learning_rate": 1e-3, "weight_decay": 0.0}  # VeLO and Celo
NAMED_ELSEWHERE = {
    "task": "a task is named by its table, [tasks.NAME]",
    "label": "a label is the name of its table, [optimizers.LABEL]",
    "seed": "seeds are given at the top, as seeds and final_seeds",
}
TRAINED = ("meta_train", "at_test")
OWN_KEYS = ("learning_rate", "learning_rates", "weight_decay", "weight_decays", "tasks", *TRAINED)


class TrainedRule(NamedTuple):
    """A rule that a recipe meta-trains before its runs."""

    folder: Path  # of the meta-training run, which equal configs share
    config: MetaConfig
    used: RuleConfig  # what the runs compute with its weights

    @property
    def file(self) -> Path:
        """The rule file that the runs load."""
        changes = differences(self.used, self.config.rule)
        return self.folder / (f"{_name('at-test', changes)}.safetensors" if changes else RULE)


@dataclass(frozen=True)
class Recipe:
    """The runs of a comparison: those that tune, and the seeds for the best of each optimizer."""

    name: str
    runs: tuple[RunConfig, ...]
    final_seeds: tuple[int, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)  # command, cost, expect
    rules: tuple[TrainedRule, ...] = ()  # to be trained first

    def finals(self, best: Sequence[RunConfig]) -> tuple[RunConfig, ...]:
        """These runs with every final seed."""
        return tuple(replace(config, seed=seed) for config in best for seed in self.final_seeds)

    def budgets(self) -> dict[str, dict[str, int]]:
        """The number of tuning runs, by task and label."""
        return {task: count_runs(runs) for task, runs in self.by_task().items()}

    def by_task(self) -> dict[str, list[RunConfig]]:
        """The tuning runs of each task."""
        tasks: dict[str, list[RunConfig]] = {}
        for config in self.runs:
            tasks.setdefault(config.task, []).append(config)
        return tasks

    def warnings(self) -> list[str]:
        """What makes the comparison unfair, in sentences."""
        tuned = {task: count_runs(_tuned(runs)) for task, runs in self.by_task().items()}
        found = [
            f"on {task} the optimizers have different tuning budgets: "
            + ", ".join(f"{label} {count} runs" for label, count in row.items())
            for task, row in tuned.items()
            if len(set(row.values())) > 1
        ]
        return found + [
            f"on {task} {what}: the optimizers do not solve the same problem"
            for task, runs in self.by_task().items()
            for what in unlike_work(runs)
        ]


def read_recipe(
    path: str | Path, also: Mapping[str, str] | None = None, out: str | Path | None = None
) -> Recipe:
    """The recipe in a TOML file; a ValueError names what is wrong in it.

    Args:
        path: the file.
        also: labels of further optimizers and their rules, each tuned as the recipe tunes celo2.
            A rule for VeLO or Celo has the label `velo` or `celo`, or is given as `velo=FILE`, and
            is not tuned.
        out: the folder of its sweep, which has the rules that it trains; runs/NAME by default.
    """
    try:
        content = tomllib.loads(Path(path).read_text("utf-8"))
        return parse_recipe(_with_rules(content, also or {}), Path(path).stem, out)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_recipe(content: Mapping[str, Any], name: str, out: str | Path | None = None) -> Recipe:
    """The recipe in a TOML file's content."""
    for key in content:
        if key not in KEYS:
            raise ValueError(f"{key!r} is not one of {', '.join(KEYS)}.")
    for key in ("tasks", "optimizers"):
        if not isinstance(content.get(key), Mapping) or not content[key]:
            raise ValueError(f"there is no table [{key}.NAME]: a recipe needs one or more.")
        for entry, table in content[key].items():
            _check_table(f"{key}.{entry}", table)
    for key in ("run", "meta_train"):
        _check_table(key, content.get(key, {}), NAMED_ELSEWHERE if key == "run" else {})
    rules = _trained_rules(content, Path(out or Path("runs") / name) / RULES)
    seeds = _seeds(content, "seeds") or (0,)
    runs = []
    for (task, on_task), (label, wish) in itertools.product(
        content["tasks"].items(), content["optimizers"].items()
    ):
        where = f"optimizers.{label} on {task}"
        _check_tasks(label, wish, content["tasks"])
        mine = {key: value for key, value in wish.items() if key != "tasks"}
        if label in rules:
            mine["optimizer"] = str(rules[label].file)
        here = wish.get("tasks", {}).get(task, {})
        base = _merge({"optimizer": label}, content.get("run", {}), on_task, mine, here)
        for rate, decay, seed in itertools.product(*_grid(base, where), seeds):
            fields = {key: value for key, value in base.items() if key not in OWN_KEYS}
            fields |= {"task": task, "label": label, "seed": seed}
            fields |= {"learning_rate": rate, "weight_decay": decay}
            try:
                runs.append(resolve(config_from_fields(fields)))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
    texts = {key: str(content[key]).strip() for key in TEXTS if key in content}
    finals = _seeds(content, "final_seeds")
    unique_runs = tuple(dict.fromkeys(runs))
    return Recipe(name, unique_runs, finals, texts, tuple(dict.fromkeys(rules.values())))


def _trained_rules(content: Mapping[str, Any], folder: Path) -> dict[str, TrainedRule]:
    """The rule of each optimizer that has a [meta_train] table, by label."""
    shared = dict(content.get("meta_train", {}))
    preset = shared.pop("preset", "celo2")
    if preset not in PRESETS:
        raise ValueError(f"meta_train.preset={preset!r} is not one of {', '.join(PRESETS)}.")
    found = {}
    for label, wish in content["optimizers"].items():
        if not set(TRAINED) & set(wish):
            continue
        if "meta_train" not in wish or "optimizer" in wish:
            given = sorted({*TRAINED, "optimizer"} & set(wish))
            raise ValueError(
                f"optimizers.{label} has {' and '.join(given)}: "
                "a rule that is trained here has meta_train, perhaps at_test, and no optimizer."
            )
        for key in TRAINED:
            _check_table(f"optimizers.{label}.{key}", wish.get(key, {}), {})
        try:
            usual = from_fields(shared, PRESETS[preset])
            config = from_fields(wish["meta_train"], usual)
            used = replace_fields(config.rule, wish.get("at_test", {}), "at_test.")
        except ValueError as error:
            raise ValueError(f"optimizers.{label}.meta_train: {error}") from error
        place = folder / _name(preset, differences(config, usual))
        found[label] = TrainedRule(place, config, used)
    return found


def _name(first: str, changes: Mapping[str, tuple[Any, Any]]) -> str:
    """A file's name that lists the changes.

    >>> _name("celo2", {"rule.hidden": ([4, 4], [8, 8])})
    'celo2_hidden-4-4'
    """
    parts = [f"{name.rpartition('.')[2]}-{value}" for name, (value, _) in changes.items()]
    name = "_".join([first, *(re.sub(r"[^\w.]+", "-", part).strip("-") for part in parts)])
    return name if len(name) <= NAME_LENGTH else f"{first}_{digest_json(changes)[:8]}"


def choose(recipe: Recipe, labels: Sequence[str]) -> Recipe:
    """The recipe with the runs of these labels only; all runs if no labels are given."""
    known = list(dict.fromkeys(str(config.label) for config in recipe.runs))
    for label in labels:
        if label not in known:
            raise ValueError(f"{label!r} is not one of {', '.join(known)}.")
    chosen = labels or known
    runs = tuple(c for c in recipe.runs if c.label in chosen)
    files = {c.optimizer for c in runs}
    rules = tuple(rule for rule in recipe.rules if str(rule.file) in files)
    return replace(recipe, runs=runs, rules=rules)


def split_label(text: str) -> tuple[str, str]:
    """The label and the rule in LABEL=RULE.

    >>> split_label("mine=runs/mine/rule.safetensors")
    ('mine', 'runs/mine/rule.safetensors')
    """
    label, sign, rule = text.partition("=")
    if not (label and sign and rule):
        raise ValueError(f"--also {text!r} is not LABEL=RULE, as in mine=rule.safetensors.")
    return label, rule


def count_all_runs(recipe: Recipe) -> int:
    """The number of runs in both stages, assuming that every optimizer has a score."""
    seeds = set(recipe.final_seeds) - {config.seed for config in recipe.runs}
    return len(recipe.runs) + len(seeds) * sum(len(row) for row in recipe.budgets().values())


def _with_rules(content: Mapping[str, Any], rules: Mapping[str, str]) -> Mapping[str, Any]:
    """The content with a further optimizer for each rule, tuned as celo2 is.

    VeLO and Celo are not tuned: they have one run each.
    """
    optimizers = content.get("optimizers", {})
    further = {}
    for label, rule in rules.items():
        if label in optimizers:
            raise ValueError(f"there is an optimizer {label!r} already: choose another label.")
        optimizer = f"{label}={rule}" if uses_lstm(f"{label}={rule}") else rule
        if uses_lstm(optimizer):
            further[label] = {"optimizer": optimizer, **AS_PUBLISHED}
        elif MODEL in optimizers:
            further[label] = optimizers[MODEL] | {"optimizer": rule}
        else:
            raise ValueError(f"{label!r} would be tuned as {MODEL} is, which the recipe has not.")
    return {**content, "optimizers": {**optimizers, **further}}


def _seeds(content: Mapping[str, Any], name: str) -> tuple[int, ...]:
    seeds = content.get(name, [])
    if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds):
        raise ValueError(f"{name}={seeds!r} is not a list of integers.")
    return tuple(seeds)


def _check_tasks(label: str, wish: Mapping[str, Any], tasks: Mapping[str, Any]) -> None:
    for task, table in wish.get("tasks", {}).items():
        if task not in tasks:
            raise ValueError(f"optimizers.{label}.tasks.{task}: the recipe has no task {task!r}.")
        _check_table(f"optimizers.{label}.tasks.{task}", table)


def _check_table(name: str, table: Any, elsewhere: Mapping[str, str] = NAMED_ELSEWHERE) -> None:
    if not isinstance(table, Mapping) or not isinstance(table.get("tasks", {}), Mapping):
        raise ValueError(f"{name} is not a table: write [{name}] and its fields below.")
    for key in elsewhere:
        if key in table:
            raise ValueError(f"{key} in [{name}]: {elsewhere[key]}.")


def _merge(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of all levels; later ones override earlier ones, in singular or plural."""
    merged: dict[str, Any] = {}
    for level in levels:
        for one, many in (("learning_rate", "learning_rates"), ("weight_decay", "weight_decays")):
            if one in level and many in level:
                raise ValueError(f"{one} and {many} are both given: leave one out.")
            if one in level or many in level:
                merged = {key: v for key, v in merged.items() if key not in (one, many)}
        merged |= level
    return merged


def _grid(base: Mapping[str, Any], where: str) -> Iterator[list[float]]:
    """Yields its learning rates, then its weight decays."""
    rates = base.get("learning_rates", base.get("learning_rate"))
    if rates is None:
        raise ValueError(f"{where} has no learning_rates.")
    for name, value in (
        ("learning_rates", rates),
        ("weight_decays", base.get("weight_decays", base.get("weight_decay", 0.0))),
    ):
        values = _spaced(value) if isinstance(value, Mapping) else value
        values = [values] if isinstance(values, (int, float)) else values
        numbers = isinstance(values, list) and all(type(v) in (int, float) for v in values)
        if not numbers or not values:
            raise ValueError(
                f"{where}: {name}={value!r} is neither a list of numbers nor "
                "{ low, high, count } with 0 < low <= high and count >= 1."
            )
        yield [float(v) for v in values]


def _spaced(span: Mapping[str, Any]) -> list[float] | None:
    """`count` numbers from low to high at equal ratios; None if the table is malformed."""
    if set(span) != {"low", "high", "count"} or type(span["count"]) is not int:
        return None
    if any(type(span[end]) not in (int, float) for end in ("low", "high")):
        return None
    if not 0 < span["low"] <= span["high"] < math.inf or span["count"] < 1:
        return None
    spaced = np.geomspace(span["low"], span["high"], span["count"])
    return [float(f"{value:.3g}") for value in spaced]


# Runs that differ in these solve different problems; schedules and the like belong to optimizers.
WORK = ("steps", "batch", "evaluation_batches", "text", "precision")


def _tuned(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """The runs without those of VeLO and Celo at a single setting, which are not tuned."""
    settings: dict[Any, set[tuple[float, float]]] = {}
    for config in configs:
        tried = settings.setdefault(config.label, set())
        tried.add((config.learning_rate, config.weight_decay))
    return [c for c in configs if not (uses_lstm(c.optimizer) and len(settings[c.label]) == 1)]


def count_runs(configs: Iterable[RunConfig]) -> dict[str, int]:
    """The number of runs, by label."""
    return Counter(str(config.label) for config in configs)


def unlike_work(configs: Sequence[RunConfig]) -> list[str]:
    """For every field of WORK that differs between runs, which label has which value.

    >>> unlike_work([RunConfig("a", label="x", steps=1), RunConfig("a", label="y", steps=2)])
    ['steps differ (x 1, y 2)']
    """
    values = {name: [(str(c.label), getattr(c, name)) for c in configs] for name in WORK}
    return [f"{name} differ ({_list(found)})" for name, found in values.items() if _differ(found)]


def unlike_data(records: Iterable[Sequence[Row]]) -> str | None:
    """Which label was trained on which data, if the runs differ in that; else None."""
    starts = [row for rows in records for row in rows if row.get("kind") == "start"]
    found = [(row["config"]["label"], str(row.get("data"))[:8]) for row in starts]
    return f"data differ (SHA-256 {_list(found)})" if _differ(found) else None


def _differ(found: Sequence[tuple[str, Any]]) -> bool:
    return len({value for _, value in found}) > 1


def _list(found: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(f"{label} {value}" for label, value in dict.fromkeys(found))
