"""The notebooks run from top to bottom, with less time to learn than a reader gives them."""

import re

import nbformat
import pytest

from conftest import REPOSITORY

NOTEBOOKS = REPOSITORY / "notebooks"
SHORTER = {
    "first_run": {"STEPS, BATCH, WIDTH = 300,": "STEPS, BATCH, WIDTH = 150,"},
    "own_rule": {"MINUTES = 5": "MINUTES = 0.3", "STEPS = 300": "STEPS = 40"},
}


def read(name: str):
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def execute(name: str, folder, monkeypatch) -> str:
    """What the shortened notebook prints."""
    nbclient = pytest.importorskip("nbclient")
    for variable in ("JAX_NUMPY_RANK_PROMOTION", "MPLBACKEND"):  # as users have it
        monkeypatch.delenv(variable, raising=False)
    notebook = read(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for before, after in SHORTER[name].items():
        (cell,) = (cell for cell in code if before in cell.source)
        cell.source = cell.source.replace(before, after)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, timeout=900, startup_timeout=300, resources=resources
    ).execute()
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs_and_links_somewhere(path):
    notebook = read(path.stem)
    assert path.stem in SHORTER
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        if cell.cell_type == "markdown":
            for link in re.findall(r"\]\(([^)#:]+)\)", cell.source):
                assert (NOTEBOOKS / link).exists(), link


@pytest.mark.slow
def test_first_run_learns_in_both_frameworks(tmp_path, monkeypatch):
    printed = execute("first_run", tmp_path, monkeypatch)
    losses = re.findall(r"^(JAX|PyTorch), (\w+): validation loss ([\d.]+)$", printed, re.MULTILINE)
    assert [found[:2] for found in losses] == [
        (framework, name) for framework in ("JAX", "PyTorch") for name in ("AdamW", "Celo2")
    ]
    assert all(float(loss) < 1.0 for *_, loss in losses)


@pytest.mark.slow
def test_own_rule_is_made_and_compared(tmp_path, monkeypatch):
    printed = execute("own_rule", tmp_path, monkeypatch)
    assert "'reason': 'time is up'" in printed
    losses = re.findall(r"^(AdamW|th.* rule) +([\d.]+) at", printed, re.MULTILINE)
    assert [name.strip() for name, _ in losses] == [
        "AdamW",
        "the start of this rule",
        "this rule",
        "the shipped rule",
    ]
    assert all(1.0 < float(loss) < 5.0 for _, loss in losses)
