"""The Triton kernels, run by Triton's interpreter on a CPU, equal the eager step."""

import dataclasses
import itertools
from typing import get_args

import pytest
import torch
from torch import nn

pytest.importorskip("triton")  # `conftest.py` chooses its interpreter

from celo2.rule import Form, Norm  # noqa: E402
from celo2.torch import Celo2, kernel  # noqa: E402
from small import GATED, SMALL, make_rule  # noqa: E402

SHAPES = {"a": (3, 5), "b": (3, 5), "tall": (70, 2), "stack": (2, 4, 3), "conv": (3, 2, 2, 2)}


def train(dtype=torch.float32, config=SMALL, shapes=SHAPES, **options):
    generator = torch.Generator().manual_seed(0)
    params = {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }
    optimizer = Celo2(list(params.items()), 1e-2, rule=make_rule(config), **options)
    for step in range(3):
        for name, param in params.items():
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            if step == 1 and name == "b":
                param.grad.view(-1)[3] = torch.nan
        if "stack" in params and step == 0:
            params["stack"].grad[1] = 0
        optimizer.step()
    return list(params.values()), [optimizer.state[param] for param in params.values()]


def check(monkeypatch, dtype=torch.float32, atol=1e-5, **options):
    launches = []
    run = kernel.triton_outputs
    monkeypatch.setattr(kernel, "triton_outputs", lambda *args: launches.append(1) or run(*args))
    ours, expected = (train(dtype, kernel=name, **options) for name in ("triton", "eager"))
    assert launches
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=atol, equal_nan=True)


# The kernels know of the form, how many outputs it needs, but not of the norm: each of them once.
@pytest.mark.parametrize(
    ("form", "norm"), list(zip(itertools.cycle(get_args(Form)), get_args(Norm), strict=False))
)
def test_kernels_equal_the_eager_step(form, norm, monkeypatch):
    check(monkeypatch, config=dataclasses.replace(SMALL, form=form, norm=norm))


def test_gate_reaches_the_kernels(monkeypatch):
    check(monkeypatch, config=GATED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_take_half_precision(dtype, monkeypatch):
    # One unit in the last place of a parameter near 2.
    check(monkeypatch, dtype, atol=2e-2, momentum_dtype=torch.bfloat16)


def test_published_policies_reach_the_kernels(monkeypatch):
    shapes = {name: SHAPES[name] for name in ("a", "b")}
    check(monkeypatch, shapes=shapes, published=True)
    check(monkeypatch, shapes=shapes, hold_unused=False)


def test_hidden_layers_may_be_wide_and_many(monkeypatch):
    shapes = {"a": (3, 5)}
    check(monkeypatch, shapes=shapes, config=dataclasses.replace(SMALL, hidden=(20, 5, 3)))


def test_a_group_of_equal_matrices_takes_three_launches(monkeypatch):
    launched = []
    for name in ("sum_gradients", "run_tiles"):
        found = getattr(kernel, name)

        class Counted:
            def __init__(self, found, name):
                self.found, self.name = found, name

            def __getitem__(self, grid):
                launched.append(self.name)
                return self.found[grid]

        monkeypatch.setattr(kernel, name, Counted(found, name))
    params = [(name, nn.Parameter(torch.ones(3, 4))) for name in "abcd"]
    for _, param in params:
        param.grad = torch.ones(3, 4)
    Celo2(params, rule=make_rule(SMALL), kernel="triton").step()
    assert launched == ["sum_gradients", "run_tiles", "run_tiles"]


def test_parameters_on_a_cpu_are_refused_without_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="needs parameters on a GPU.*TRITON_INTERPRET=1"):
        train(kernel="triton")
