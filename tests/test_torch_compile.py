"""The compiled step equals the eager one."""

import functools

import pytest
import torch
from torch import nn

from celo2.torch import Celo2
from torch_models import LR, RULE, assert_same, make_model, train


def train_both(make, steps: int = 2, **tolerance) -> None:
    """Trains a matrix as `make` says for compile=False and True, and compares."""
    models = [nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    for compiled, model in zip((False, True), models, strict=True):
        optimizer = make(model, compiled)
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert_same(*models, **tolerance)


def make_optimizer(model: nn.Module, compiled: bool) -> Celo2:
    return Celo2(
        model, LR, rule=RULE, weight_decay=0.1, compile=compiled, overrides={"weight": "rule"}
    )


def test_compiled_passes_equal_eager_ones_without_breaking_the_graph(monkeypatch):
    @functools.cache
    def trace_only(function):
        return torch.compile(function, dynamic=True, fullgraph=True, backend="eager")

    monkeypatch.setattr("celo2.torch.step._compiled", trace_only)
    train_both(make_optimizer, rtol=1e-5, atol=1e-6)


def test_step_as_a_whole_can_be_compiled():
    def make(model, compiled):
        optimizer = make_optimizer(model, False)
        model[0].weight.grad = torch.ones_like(model[0].weight)
        optimizer.step()  # makes the state
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        return optimizer

    train_both(make, steps=1, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
def test_fused_loops_equal_eager_passes():
    models = [make_model(), make_model()]
    for compiled, model in zip((False, True), models, strict=True):
        train(model, Celo2(model, LR, rule=RULE, weight_decay=0.1, compile=compiled))
    assert_same(*models, rtol=1e-4, atol=1e-5)
