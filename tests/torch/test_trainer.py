"""The Torch examples, each in a process of its own, and the helper for Trainer."""

import copy
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from celo2.torch.trainer import for_trainer
from conftest import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
RUN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
WITHOUT_JAX = RUN + "; assert 'jax' not in sys.modules"


def run(*arguments, code: str = RUN, timeout: float = 300) -> str:
    """What an example prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def number_after(word: str, text: str) -> float:
    return float(text.rsplit(word, 1)[1].split()[0])


def test_plain_loop_runs_without_jax():
    printed = run(EXAMPLES / "torch_loop.py", "--steps", "2", code=WITHOUT_JAX)
    assert "celo2 updates" in printed
    assert number_after("AdamW: loss ", printed) < 7
    assert number_after("Celo2: loss ", printed) < 7


@pytest.mark.slow
def test_celo2_learns_faster_than_adamw_in_the_plain_loop():
    printed = run(EXAMPLES / "torch_loop.py", "--steps", "100")
    assert number_after("Celo2: loss ", printed) < number_after("AdamW: loss ", printed) < 3.5


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.hidden(self.norm(self.embed(x))))


class Arguments:
    learning_rate = 3e-3
    weight_decay = 0.5


def make_for_trainer(model: nn.Module, **settings):
    """As Trainer does."""
    factory, kwargs = for_trainer(Arguments(), **settings)
    assert not issubclass(factory, torch.optim.Optimizer)
    return factory()(model, **kwargs)


def test_trainer_gets_names_and_decays_no_vector():
    model = Small()
    optimizer = make_for_trainer(model)
    names = {id(param): name for name, param in model.named_parameters()}
    decay = {}
    for group in optimizer.param_groups:
        assert [names[id(param)] for param in group["params"]] == group["param_names"]
        assert group["lr"] == Arguments.learning_rate
        decay |= dict.fromkeys(group["param_names"], group["weight_decay"])
    assert decay == {name: 0.5 if p.ndim == 2 else 0.0 for name, p in model.named_parameters()}
    updaters = {line.path: line.updater for line in optimizer.explain()}
    assert [name for name, updater in updaters.items() if updater == "rule"] == ["hidden.weight"]


def test_settings_go_before_the_trainers_arguments():
    optimizer = make_for_trainer(Small(), lr=1e-3, rule="celo2-base", betas=(0.8, 0.9))
    for group in optimizer.param_groups:
        assert (group["lr"], group["rule"], group["betas"]) == (1e-3, "celo2-base", (0.8, 0.9))


def test_groups_for_the_trainer_step_and_load():
    first, second = Small(), Small()
    optimizers = [make_for_trainer(model) for model in (first, second)]
    tokens = torch.arange(5)
    for step in range(4):
        if step == 2:
            second.load_state_dict(first.state_dict())
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


TRAINER_RESUMES = """
import sys, torch
from pathlib import Path
from transformers import set_seed
from torch_trainer import make_trainer

found = []
for resume in (None, str(Path(sys.argv[1]) / "checkpoint-2")):
    set_seed(0)
    trainer = make_trainer(sys.argv[1], 4, save_strategy="steps", save_steps=2)
    trainer.train(resume_from_checkpoint=resume)
    assert type(trainer.optimizer.optimizer).__name__ == "Celo2"
    found.append([param.detach().clone() for param in trainer.model.parameters()])
for whole, resumed in zip(*found, strict=True):
    assert torch.equal(whole, resumed)
print("equal")
"""


@pytest.mark.slow
def test_trainer_trains_and_resumes(tmp_path):
    pytest.importorskip("transformers")
    assert "celo2 updates" in run(
        EXAMPLES / "torch_trainer.py", "--steps", "3", "--out", tmp_path / "run"
    )
    assert "equal" in run(tmp_path / "resume", code=TRAINER_RESUMES)


@pytest.mark.slow
def test_lightning_recipe_learns(tmp_path):
    pytest.importorskip("lightning")
    printed = run(EXAMPLES / "torch_lightning.py", "--out", tmp_path)
    assert number_after("accuracy ", printed) > 0.9


@pytest.mark.slow
def test_accelerate_recipe_learns():
    pytest.importorskip("accelerate")
    printed = run(EXAMPLES / "torch_accelerate.py")
    assert number_after("accuracy ", printed) > 0.85


def test_code_of_the_guide_runs():
    guide = (REPOSITORY / "docs" / "torch.md").read_text(encoding="utf-8")
    single = guide.split("## DDP and FSDP2")[0]
    blocks = re.findall(r"```python\n(.*?)```", single, re.DOTALL)
    assert len(blocks) == 3
    model = nn.Module()
    model.body, model.head = nn.Linear(4, 4), nn.Linear(4, 2)
    names = {
        "model": model,
        "batches": torch.ones(3, 2, 4),
        "loss_of": lambda model, x: model.head(model.body(x)).square().mean(),
    }
    before = model.body.weight.detach().clone()
    for block in blocks:
        exec(block, names)
    assert not torch.equal(model.body.weight, before)
    updaters = {line.path: line.updater for line in names["optimizer"].explain()}
    assert updaters["body.weight"] == "rule" and updaters["head.weight"] == "adam"
