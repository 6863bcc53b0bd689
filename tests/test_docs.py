"""The documentation leads somewhere: links of every page, the package index page, the site."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib

import pytest

from conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
SOURCE = PROJECT["project"]["urls"]["Source"]
PAGES = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for folder in (".", "docs", "docs/api", "recipes", "rules", "benchmarks", "tests/golden")
    for path in (REPOSITORY / folder).glob("*.md")
) + ["src/celo2/pretrained/README.md"]
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")


def read(name: str) -> str:
    return (REPOSITORY / name).read_text("utf-8")


def headings(page: str) -> set[str]:
    """The anchors that GitHub and MkDocs give a page's headings."""
    plain = (re.sub(r"[^\w\s-]", "", line) for line in re.findall(r"^#+ (.*)$", page, re.MULTILINE))
    return {re.sub(r"\s", "-", line.strip().lower()) for line in plain}


@pytest.mark.parametrize("name", PAGES)
def test_links_of_the_page_lead_somewhere(name):
    folder = (REPOSITORY / name).parent
    for link in LINK.findall(read(name)):
        assert (folder / link).exists(), link


@pytest.mark.parametrize("name", PAGES)
def test_links_into_pages_lead_to_headings(name):
    folder = (REPOSITORY / name).parent
    for path, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([\w-]+)\)", read(name)):
        page = folder / path if path else REPOSITORY / name
        assert anchor in headings(page.read_text("utf-8")), f"{path}#{anchor}"


@pytest.mark.parametrize("name", PAGES)
def test_python_blocks_of_the_page_are_python(name):
    for block in re.findall(r"^```python\n(.*?)^```", read(name), re.MULTILINE | re.DOTALL):
        ast.parse(block)


def test_address_of_the_project_is_in_one_file():
    tracked = [
        path
        for pattern in ("*.md", "*.yml", "*.cff", "docs/**/*.py", "src/**/*.py", "examples/**/*.py")
        for path in REPOSITORY.glob(pattern)
        if path.name != "pyproject.toml"
    ]
    assert len(tracked) > 50
    assert [path for path in tracked if SOURCE in path.read_text("utf-8")] == []
    urls = re.findall(r"https://github[^'\"]*", read("pyproject.toml"))
    assert len(urls) >= 4 and all(url.startswith(SOURCE) for url in urls)


def test_version_is_the_same_everywhere():
    version = PROJECT["project"]["version"]
    assert f"\nversion: {version}\n" in read("CITATION.cff")
    assert re.search(rf"^## {re.escape(version)}\b", read("CHANGELOG.md"), re.MULTILINE)


def test_readme_of_the_package_index_has_absolute_links():
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    page = read("README.md")
    links = LINK.findall(page)
    for rule in hook["substitutions"]:
        page = re.sub(rule["pattern"], rule["replacement"], page)
    assert len(links) > 20 and LINK.findall(page) == []
    for link in links:
        kind = "raw" if link.endswith((".png", ".svg")) else "blob"
        assert f"]({SOURCE}/{kind}/v$HFPR_VERSION/{link}" in page


def test_release_runs_tests_that_there_are():
    tests = runpy.run_path(str(REPOSITORY / ".ci" / "check_release.py"))["TESTS"]
    assert tests and [name for name in tests if not (REPOSITORY / name).is_file()] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation site, built as `make docs` does."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", ["", "jax", "torch", "metatrain", "tasks", "evaluate"])
def test_site_documents_every_public_name(site, name):
    package = f"celo2.{name}".rstrip(".")
    source = ast.parse(read(f"src/{package.replace('.', '/')}/__init__.py"))
    (public,) = (
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    page = (site / "api" / (name or "celo2") / "index.html").read_text("utf-8")
    # A function that has its module's name is listed as celo2.evaluate.run.run.
    shown = set(re.findall(rf'id="{package}\.(?:\w+\.)?(\w+)"', page))
    assert set(public) - shown == set()


def test_pages_of_the_site_have_a_place_in_its_menu(site):
    home = (site / "index.html").read_text("utf-8")
    for page in site.rglob("index.html"):
        if (where := page.parent.relative_to(site).as_posix()) != ".":
            assert f'href="{where}/"' in home, where
