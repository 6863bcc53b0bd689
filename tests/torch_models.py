"""A small Torch model and its training, shared by the tests of the Torch room."""

import torch
from torch import Tensor, nn

from small import make_rule

RULE = make_rule()
LR = 1e-2


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Two matrices of one shape for the rule; vectors and a head for AdamW."""
    torch.manual_seed(seed)
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
    return nn.Sequential(*layers, nn.Linear(6, 2)).to(dtype)


def loss_of(model: nn.Module) -> Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.linspace(-1, 1, 12).reshape(3, 4).to(dtype)
    return (model(x) - x[:, :2].sin()).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    """The losses before each of the steps."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(a, b, **tolerance) -> None:
    """Models, optimizers' states or tensors: equal to the bit unless tolerances are given."""
    a, b = (list(x.parameters()) if isinstance(x, nn.Module) else x for x in (a, b))
    torch.testing.assert_close(a, b, **{"rtol": 0, "atol": 0} | tolerance)
