"""The architecture page says what the source is."""

import importlib.util
import re
from pathlib import Path

import pytest

from conftest import run_python

DOCS = Path(__file__).resolve().parents[1] / "docs"
spec = importlib.util.spec_from_file_location("draw_architecture", DOCS / "draw_architecture.py")
assert spec is not None and spec.loader is not None
draw = importlib.util.module_from_spec(spec)
spec.loader.exec_module(draw)


def without_lengths(page: str) -> str:
    return re.sub(r"\| \d+ \|", "|", page)


def test_module_table_is_that_of_the_source():
    page = draw.PAGE.read_text("utf-8")
    assert without_lengths(draw.with_table(page)) == without_lengths(page), (
        "run python docs/draw_architecture.py"
    )


def test_every_part_has_a_place_in_the_picture():
    drawn = {part for row in draw.ROWS for part in row} | {"__init__"}
    assert {draw.part_of(path) for path in draw.SOURCE.rglob("*.py")} == drawn


@pytest.mark.parametrize("edge", sorted(draw.edges()), ids=" → ".join)
def test_imports_point_down(edge):
    row = {part: i for i, parts in enumerate(draw.ROWS) for part in parts}
    assert row[edge[0]] > row[edge[1]] or edge == ("commands", "cli")


def test_dry_run_of_a_sweep_loads_at_most_fifty_modules():
    code = """
import sys
from celo2.cli import main
assert main(["sweep", "recipes/quick.toml", "--dry-run"]) == 0
print(sum(name.partition(".")[0] == "celo2" for name in sys.modules))
"""
    assert int(run_python(code, devices=1).split()[-1]) <= 50


TESTS = Path(__file__).parent
PACKAGES = [folder.name for folder in draw.SOURCE.iterdir() if list(folder.glob("*.py"))]


@pytest.mark.parametrize(
    "path",
    [path for name in PACKAGES for path in sorted((TESTS / name).glob("test_*.py"))],
    ids=lambda path: path.relative_to(TESTS).as_posix(),
)
def test_test_is_named_after_a_module(path):
    package, name = path.parent.name, path.stem.removeprefix("test_")
    modules = {module.stem for module in (draw.SOURCE / package).glob("*.py")} | {package}
    assert any(name == module or name.startswith(f"{module}_") for module in modules)


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", draw.PAGE.read_text("utf-8"))
    assert links and all((DOCS / link).exists() for link in links)
