"""A small sharded model and its training, shared by the scenarios of several processes."""

import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from celo2.rule import CELO2_BASE
from celo2.torch import Celo2
from small import make_rule

VOCAB, WIDTH, LENGTH, BATCH = 11, 5, 6, 4  # five rows over two processes: three and two
LR = 2e-3
SCENARIOS: dict[int, dict[str, Callable[["Here"], None]]] = {2: {}, 4: {}}  # by processes
RULES = {"celo2": "celo2", "celo2_base": make_rule(CELO2_BASE)}


class Here:
    """This process: its rank, the mesh of all and the folder they share."""

    device = torch.device("cpu")

    def __init__(self, rank: int, processes: int, folder: Path):
        self.rank, self.folder = rank, folder
        self.mesh = dist.init_device_mesh("cpu", (processes,))


def scenario(function):
    SCENARIOS[2][function.__name__] = function
    return function


def scenario_of_four(function):
    SCENARIOS[4][function.__name__] = function
    return function


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 1)  # a single row: the second process has nothing of it
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.gate(x).sigmoid() * self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.conv(x.mT).mT
        for block in self.blocks:
            x = block(x)
        x = x + torch.einsum("btd,eod->bto", x, self.experts).tanh()
        return self.head(x)


def loss_of(model: nn.Module, step: int, rows: slice = slice(None)) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (BATCH, 1), generator=draw) + 3 * torch.arange(LENGTH + 1)
    tokens = (tokens % VOCAB)[rows]
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, optimizer: Celo2, steps: range, rows: slice = slice(None)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rows).backward()
        optimizer.step()


def own_rows(here: Here) -> slice:
    half = BATCH // 2
    return slice(half * here.rank, half * (here.rank + 1))


def sharded(here: Here, seed: int = 0, along: Callable | None = None) -> nn.Module:
    model = Model(seed)
    for block in model.blocks:
        fully_shard(block, mesh=here.mesh, shard_placement_fn=along)
    return fully_shard(model, mesh=here.mesh)


def make_optimizer(model: nn.Module, kind: str = "celo2", weight_decay: float = 0.1) -> Celo2:
    return Celo2(model, LR, rule=RULES[kind], weight_decay=weight_decay)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@functools.cache
def one_process(kind: str, steps: int) -> nn.Module:
    model = Model()
    train(model, make_optimizer(model, kind), range(steps))
    return model


def check_equal_to_one_process(model: nn.Module, kind: str, steps: int) -> None:
    trained = zip(model.parameters(), one_process(kind, steps).parameters(), strict=True)
    for (ours, expected), before in zip(trained, Model().parameters(), strict=True):
        torch.testing.assert_close(whole(ours), expected, rtol=1e-4, atol=1e-5)
        if expected.numel() > 1:  # the bias of `gate` alone can come back to where it began
            assert (expected - before).abs().max() > LR / 2


def check_fully_sharded(
    here: Here, kind: str, steps: int = 8, along: Callable | None = None
) -> None:
    model = sharded(here, along=along)
    optimizer = make_optimizer(model, kind)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    train(model, optimizer, range(steps), own_rows(here))
    check_equal_to_one_process(model, kind, steps)
