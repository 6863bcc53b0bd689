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


def make_optimizer(model: nn.Module, compiled: bool, **options) -> Celo2:
    overrides = {"weight": "rule"}
    return Celo2(
        model, LR, rule=RULE, weight_decay=0.1, compile=compiled, overrides=overrides, **options
    )


@pytest.fixture
def trace_only(monkeypatch):
    """Programs are traced whole but not built."""
    torch._dynamo.reset()

    @functools.cache
    def compiled(function):
        return torch.compile(function, dynamic=True, fullgraph=True, backend="eager")

    monkeypatch.setattr("celo2.torch.grouping._compiled", compiled)


@pytest.mark.usefixtures("trace_only")
def test_compiled_stages_equal_eager_ones_without_breaking_the_graph():
    train_both(make_optimizer, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("trace_only")
def test_other_shapes_and_learning_rates_need_no_new_program():
    model = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in ((5, 5), (7, 4)))
    optimizer = make_optimizer(model, True, foreach=False)  # small ones would be stacked
    model[0].weight.grad, model[1].weight.grad = (torch.ones_like(m.weight) for m in model)
    optimizer.step()
    with torch._dynamo.config.patch(error_on_recompile=True):
        optimizer.param_groups[0]["lr"] /= 2
        optimizer.step()
        other = nn.ModuleList([nn.Linear(9, 6, bias=False), nn.Linear(8, 8, bias=False)])
        optimizer = make_optimizer(other, True, foreach=False)
        for layer in other:
            layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()


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
