"""Numbers in the README's and the documentation's tables are those of the records they cite."""

import importlib.util
import json
import re
import tomllib
from types import ModuleType

import pytest

from conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
MARK = re.compile(r"<!-- (?!end |source: )([\w. -]+) -->(.*?)<!-- end \1 -->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\d)")


def load(name: str) -> ModuleType:
    """A script of benchmarks/."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results() -> ModuleType:
    return load("results")


@pytest.fixture(scope="module")
def pages(results) -> dict:
    return {
        path.relative_to(REPOSITORY).as_posix(): page
        for path, page in results.pages(results.read_tasks()).items()
    }


@pytest.mark.parametrize("name", ["README.md", "docs/results.md", "docs/learning-rate.md"])
def test_tables_of_the_page_are_those_of_the_records(pages, name):
    page = (REPOSITORY / name).read_text("utf-8")
    assert pages[name] == page, "run python benchmarks/results.py"


def test_other_pages_are_those_of_the_records(pages):
    for name, page in pages.items():
        assert page == (REPOSITORY / name).read_text("utf-8"), "run python benchmarks/results.py"


def test_pages_of_experiments_are_those_of_the_records():
    pages = load("experiments").pages()
    assert {path.name for path in pages} >= {"learning-rate.md", "weight-decay.md"}
    for path, page in pages.items():
        assert page == path.read_text("utf-8"), "run python benchmarks/experiments.py"


def test_a_wrong_number_is_noticed(results):
    right = (REPOSITORY / "README.md").read_text("utf-8")
    (shown,) = re.findall(r"AdamW (\d\.\d{3}), Muon", right)
    wrong = right.replace(shown, "9.999")
    blocks = results.demo_losses(DOCS / "figures" / "demo.jsonl")
    path = REPOSITORY / "README.md"
    assert results.fill(wrong, "demo", blocks, path) == right != wrong
    with pytest.raises(ValueError, match="no place for lm-9"):
        results.fill(right, "lm-9", "", path)


WITH_MEASUREMENTS = (
    "README.md",
    *(f"docs/{name}.md" for name in ("results", "learning-rate", "nanogpt", "scaling")),
    *(f"docs/{name}.md" for name in ("sharding", "baselines")),
)


@pytest.mark.parametrize("name", WITH_MEASUREMENTS)
def test_every_table_with_measurements_says_where_they_are_from(name):
    page = MARK.sub("", (REPOSITORY / name).read_text("utf-8"))
    for table in re.findall(r"(?:^.*\n)(?:^\|.*\n)+", page, re.MULTILINE):
        above, *rows = table.splitlines()
        if re.search(r"\d\.\d|\de-\d", " ".join(rows)):
            assert above.startswith("<!-- source: "), f"no source above:\n{table}"


@pytest.mark.parametrize("name", ["README.md", "docs/baselines.md"])
def test_costs_of_the_page_are_in_the_benchmarks(name):
    page = (REPOSITORY / name).read_text("utf-8")
    source = (REPOSITORY / "benchmarks" / "README.md").read_text("utf-8")
    known = [float(number.replace(",", "")) for number in NUMBER.findall(source)]
    table = page.split("<!-- source: benchmarks/README.md -->\n", 1)[1].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        _, cell = line.split(" | ", 1)
        for number in NUMBER.findall(cell):
            digits = len(number.replace(",", "").replace(".", "").strip("0"))
            value = float(number.replace(",", ""))
            near = [n for n in known if float(f"{n:.{max(1, digits)}g}") == value]
            assert near, f"{number} of {cell!r} is not in benchmarks/README.md"


def test_table_of_scales_is_that_of_its_records():
    page = (DOCS / "scaling.md").read_text("utf-8")
    rows = (DOCS / "results" / "scale.jsonl").read_text("utf-8").splitlines()
    (shown,) = (text for name, text in MARK.findall(page) if name == "scale")
    assert shown.strip() == load("scale").as_table([json.loads(row) for row in rows])


def test_sums_below_the_table_of_scales_are_those_of_its_records():
    page = (DOCS / "scaling.md").read_text("utf-8")
    lines = (DOCS / "results" / "scale.jsonl").read_text("utf-8").splitlines()
    rows = {(row["size"], row["optimizer"]): row for row in map(json.loads, lines)}
    shown = {
        ("gpt2", "celo2"): "58 MB in 93 collectives",
        ("gpt2", "muon"): "849 MB in 362",
        ("gpt3xl", "celo2"): "0.8 GB in 477",
        ("gpt3xl", "muon"): "35 GB in 2,934",
    }
    flat = " ".join(page.split())
    for key, text in shown.items():
        sent, count = text.split(" in ")
        amount, unit = sent.split()
        kinds = rows[key]["collectives"].values()
        runs = sum(kind["runs"] for kind in kinds)
        assert text in flat and f"{runs:,}" == count.split()[0]
        in_unit = sum(kind["bytes"] for kind in kinds) / {"MB": 1e6, "GB": 1e9}[unit]
        assert f"{in_unit:.{len(amount.partition('.')[2])}f}" == amount


def test_base_has_higher_losses_wherever_the_questions_say_so(results):
    page = " ".join((DOCS / "faq.md").read_text("utf-8").split())
    assert "its loss is lower on all six problems with a loss" in page
    losses = [pair for pair in results.read_tasks() if not results.is_game(pair[1])]
    assert len(losses) == 6
    for sweep, task in losses:
        found = {entry.label: results.mean_score(entry.seeds) for entry in sweep.tasks[task]}
        assert found["celo2"] < found["celo2-base"], task


@pytest.mark.parametrize("name", ["lm-0.8m", "lm-1m-wikipedia"])
def test_losses_that_a_recipe_leads_to_expect_are_those_of_its_records(results, name):
    recipe = tomllib.loads((REPOSITORY / "recipes" / f"{name}.toml").read_text("utf-8"))
    (entries,) = results.read_sweep(REPOSITORY / "results" / f"{name}.jsonl").tasks.values()
    losses = {entry.label: results.mean_score(entry.seeds) for entry in entries}
    labels = {name: label for label, name in results.NAMES.items()} | {"its start": "celo2-start"}
    shown = re.findall(r"(AdamW|Muon|Celo2-base|Celo2|its start) (\d\.\d+)", recipe["expect"])
    assert len(shown) == 5
    for label, loss in shown:
        assert f"{losses[labels[label]]:.3f}" == loss, label
