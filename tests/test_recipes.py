"""The shipped recipes: fair, complete, and such that every run of them can be built."""

import re
import shlex
from typing import get_args

import numpy as np
import pytest

from celo2.commands.evaluate import show_plan
from celo2.evaluate import RunConfig, describe, read_recipe
from celo2.evaluate.optimizers import load_rule
from celo2.evaluate.program import stand_in
from celo2.metatrain.config import Augmentation
from celo2.rule import Form, Norm, Rule, initial_weights
from celo2.rulefile import pretrained, save
from conftest import REPOSITORY

FOLDER = REPOSITORY / "recipes"
NAMES = sorted(str(p.relative_to(FOLDER).with_suffix("")) for p in FOLDER.rglob("*.toml"))
PAPER = [name for name in NAMES if name.startswith("paper/")]
NEED_RULES = [
    name for name in PAPER if "meta-train" in (FOLDER / f"{name}.toml").read_text("utf-8")
]
# Built in the ordinary run of the tests: one of each kind. The others take minutes together.
QUICKLY = (
    *("quick", "lm-0.8m", "minatar"),
    "paper/lm30m",
    "paper/ablation-augmentation",
)
RULE = "rule.safetensors"
# The field of the rules' config that a recipe varies, and its values.
VARIED = {
    "paper/ablation-hidden": ("hidden", {(4, 4), (8, 8), (16, 16), (32, 32)}),
    "paper/ablation-rms-decay": ("rms_decay", {0.9, 0.95, 0.99, 0.999}),
    "paper/ablation-form": ("form", set(get_args(Form))),
    "paper/ablation-norms": ("norm", set(get_args(Norm))),
    "paper/ablation-output-norm": ("norm", {"raw", "norm"}),
    "paper/gpt2-orthogonalization": ("orthogonalize", {True, False}),
}
TOKENS = {"lm30m": 600_047_616, "gpt2": 2_479_882_240, "gpt3xl": 13_002_342_400}


def read(name):
    return read_recipe(FOLDER / f"{name}.toml")


def comments(name) -> str:
    """The lines of a recipe's comments, joined where they end in a backslash."""
    lines = (FOLDER / f"{name}.toml").read_text("utf-8").splitlines()
    text = "\n".join(line[2:] for line in lines if line.startswith("# "))
    return re.sub(r"\\\n\s*", "", text)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_fair_and_says_what_it_costs(name):
    recipe = read(name)
    assert recipe.warnings() == [] and set(recipe.texts) == {"command", "cost", "expect"}
    assert f"recipes/{name}.toml" in recipe.texts["command"]
    runs = re.match(r"(\d+) (short )?runs", recipe.texts["cost"])
    seeds = set(recipe.final_seeds) - {config.seed for config in recipe.runs}
    finals = len(seeds) * sum(len(row) for row in recipe.budgets().values())
    assert runs is not None and int(runs[1]) == len(recipe.runs) + finals


@pytest.mark.parametrize("name", PAPER)
def test_paper_s_recipe_follows_its_protocol(name):
    recipe = read(name)
    assert re.match(r"(Figure|Table) \d", recipe.texts["expect"])
    for config in recipe.runs:
        rl = config.task.startswith("minatar-")
        assert config.clip == (0.5 if rl else None)
        if config.label == "velo":  # in its "default self-tuned mode"
            assert (config.learning_rate, config.weight_decay) == (1e-3, 0.0)
            assert (config.schedule, config.warmup) == ("constant", 0.0)
            continue
        assert config.warmup == (0.0 if rl else 0.02 if config.task.startswith("vit") else 0.05)
        # Figure 6 also has constant rates.
        allowed = {"linear", "constant"} if name.endswith("sensitivity") else {"linear"}
        assert config.schedule in (allowed if rl else {"cosine"})
        assert rl or "lm30m" in name or config.weight_decay == 0.1


def test_every_recipe_is_in_the_table_of_the_readme():
    text = (FOLDER / "README.md").read_text("utf-8")
    assert set(re.findall(r"\(([\w./-]+)\.toml\)", text)) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_table_of_the_readme_has_the_recipe_s_cost(name):
    text = (FOLDER / "README.md").read_text("utf-8")
    (row,) = (r for r in text.splitlines() if r.startswith("|") and f"({name}.toml)" in r)
    shown = row.split(" | ")[-1].removesuffix(" |").replace("CPU ", "")
    cost = read(name).texts["cost"].replace("CPU ", "")
    if found := re.fullmatch(r"([\d,]+) GPU h(?:, (\d) rules)?", shown):
        assert f"GPU hours: {found[1]} (" in cost
        assert (f"and {found[2]} meta-training runs" in cost) == (found[2] is not None)
    elif found := re.fullmatch(r"(\d+) h on two cores", shown):
        assert f"on two cores: about {found[1]} hours" in cost
    else:
        assert shown in cost


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICKLY else [pytest.mark.slow]) for n in NAMES]
)
def test_every_optimizer_of_the_recipe_can_be_built_without_data(name, capsys):
    recipe = read(name)
    show_plan(recipe)
    shown = capsys.readouterr().out
    for config in recipe.runs:
        assert f"{config.task} with {config.label}" in shown
        if config.task in TOKENS:
            assert f"{TOKENS[config.task]:,}" in shown


@pytest.mark.parametrize("name", NEED_RULES)
def test_commands_of_the_recipe_make_the_rules_it_names(name, tmp_path, monkeypatch):
    meta_train = pytest.importorskip("celo2.commands.meta_train")
    monkeypatch.chdir(tmp_path)
    text = comments(name)
    for command in re.findall(r"^celo2 meta-train (.*)$", text, re.MULTILINE):
        options = meta_train.parse_options(shlex.split(command))
        assert options.meta.iterations == 100_000
        out = tmp_path / options.out
        out.mkdir(parents=True)
        config = options.meta.rule
        save(Rule(config, initial_weights(config, np.random.default_rng(0))), out / RULE)
    for script in re.findall(r"^python - <<'END'\n(.*?)^END$", text, re.MULTILINE | re.DOTALL):
        exec(compile(script, name, "exec"), {})
    made = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.safetensors")}
    assert {config.optimizer for config in read(name).runs} == made
    rules = [rule for rule in map(load_rule, made) if rule is not None]
    field, values = VARIED.get(name, ("norm", {"norm"}))
    assert {getattr(rule.config, field) for rule in rules} == values


def test_ablations_train_every_variant_once():
    recipe = read("ablations")
    configs = {rule.folder: rule.config for rule in recipe.rules}.values()
    assert f"after {len(configs)} rules" in recipe.texts["cost"]
    rules = [config.rule for config in configs]
    for field in ("hidden", "rms_decay", "form", "norm"):
        _, values = VARIED[f"paper/ablation-{field.replace('_', '-').replace('norm', 'norms')}"]
        assert {getattr(rule, field) for rule in rules} == values
    assert {config.augmentation for config in configs} == set(get_args(Augmentation))
    both = {(rule.orthogonalize, rule.vectors) for rule in rules}
    assert len(both) == 4 and both == {(r.used.orthogonalize, r.used.vectors) for r in recipe.rules}


def test_rule_file_that_is_not_there_yet_has_a_stand_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file, name in (("base-4", "celo2-base"), ("new", "celo2")):
        assert stand_in(f"runs/{file}/rule.safetensors") == (name, pretrained(name))
    for known in ("celo2", "adamw", "hf://a/b/rule.safetensors", "module:function"):
        assert stand_in(known) is None
    facts = describe(RunConfig("digits-mlp", "runs/base-4/rule.safetensors", label="four"))
    assert facts["optimizer"].startswith("four (celo2-base for runs/base-4/rule.safetensors")
    (tmp_path / RULE).touch()
    assert stand_in(RULE) is None
