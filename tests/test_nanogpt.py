"""The nanoGPT page: its commands change one line, and records of the example make a table."""

import json
import re
import runpy
import subprocess
import sys

import pytest
import torch

from conftest import REPOSITORY
from test_tables import load

EXAMPLE = REPOSITORY / "examples" / "nanogpt" / "train.py"
PAGE = REPOSITORY / "docs" / "nanogpt.md"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the example on a small text and gives what it prints."""
    text = tmp_path / "input.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 40)

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", "--text", str(text), *arguments])
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(EXAMPLE), run_name="__main__")
        return capsys.readouterr().out

    return call


def test_all_optimizers_start_alike_and_are_recorded_once(run, tmp_path):
    short = ("--steps", "2", "--rates", "1e-3", "2e-3", "--seeds", "0", "1")
    printed = run(*short)
    rows = [json.loads(line) for line in (tmp_path / "nanogpt.jsonl").read_text().splitlines()]
    assert [row["optimizer"] for row in rows] == ["adamw"] * 3 + ["muon"] * 3 + ["celo2"] * 3
    assert [row["seed"] for row in rows] == [0, 0, 1] * 3
    assert all(2.0 < row["valid_loss"] < 4.0 for row in rows)
    assert len({row["valid_loss"] for row in rows}) == 9
    assert run(*short) == printed  # from the records
    assert len((tmp_path / "nanogpt.jsonl").read_text().splitlines()) == 9
    table = load("results").nanogpt_table(tmp_path / "nanogpt.jsonl")
    assert re.findall(r"^\| (\w+) \| 1e-3 … 2e-3 \|", table, re.MULTILINE) == [
        "AdamW",
        "Muon",
        "Celo2",
    ]
    best = min(row["valid_loss"] for row in rows[6:8])
    assert f"{best:.3f}" in table.splitlines()[-1]


def test_every_optimizer_updates_every_parameter_once():
    example = runpy.run_path(str(EXAMPLE))
    for make, _ in example["OPTIMIZERS"].values():
        model = example["GPT"](vocab=11)
        groups = [group for optimizer in make(model, 1e-3) for group in optimizer.param_groups]
        updated = [id(param) for group in groups for param in group["params"]]
        assert len(updated) == len(set(updated))
        assert set(updated) == {id(param) for param in model.parameters()}


def test_model_is_causal():
    example = runpy.run_path(str(EXAMPLE))
    model = example["GPT"](vocab=11)
    tokens = torch.arange(20).remainder(11)[None]
    changed = tokens.clone()
    changed[0, 12] += 1
    differs = (model(tokens) - model(changed)).abs().amax(-1)[0] > 0
    assert differs.tolist() == [False] * 12 + [True] * 8


def test_commands_of_the_page_change_one_line(tmp_path):
    before = "import torch\n\ndef make(self):\n    optimizer = torch.optim.AdamW(groups, lr=1)\n"
    (tmp_path / "model.py").write_text(before)
    commands = re.findall(r"^sed .*$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    after = (tmp_path / "model.py").read_text().splitlines()
    assert after[0] == "from celo2.torch import Celo2" and after[1:4] == before.splitlines()[:3]
    (line,) = after[4:]
    assert line.startswith("    optimizer = Celo2(self, lr=learning_rate, ")
    assert f"+    {line}" in PAGE.read_text("utf-8")
