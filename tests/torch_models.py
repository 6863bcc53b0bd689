"""A small Torch model and its training, shared by the Torch tests."""

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


class Transformer(nn.Module):
    """A decoder with tied embeddings, as language models are."""

    def __init__(self, tied: bool = True):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(11, 8), nn.Embedding(4, 8)
        self.attn = nn.MultiheadAttention(8, 2)
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Parameter:
    """With a gradient."""
    generator = torch.Generator().manual_seed(seed)
    param, grad = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    param = nn.Parameter(param)
    param.grad = grad
    return param


def rms(x: torch.Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()
