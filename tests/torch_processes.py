"""What each process does for `test_torch_distributed.py`, started as

    python torch_processes.py RANK PROCESSES FOLDER

with a folder they share. Writes a JSON file: the name of each scenario → "" or its traceback.
"""

import functools
import json
import sys
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import celo2.torch.step
from celo2.layout import MatrixView
from celo2.rule import CELO2_BASE
from celo2.torch import Celo2
from celo2.torch.tensors import aligned, frame_of
from small import SMALL, make_rule

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
        assert (expected - before).abs().max() > LR / 2


def check_fully_sharded(
    here: Here, kind: str, steps: int = 20, along: Callable | None = None
) -> None:
    model = sharded(here, along=along)
    optimizer = make_optimizer(model, kind)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    train(model, optimizer, range(steps), own_rows(here))
    check_equal_to_one_process(model, kind, steps)


@scenario
def fully_sharded_celo2_base_equals_one_process(here: Here):
    check_fully_sharded(here, "celo2_base")


@scenario
def fully_sharded_celo2_equals_one_process(here: Here):
    check_fully_sharded(here, "celo2")


@scenario
def sharding_along_the_second_axis_equals_one_process(here: Here):
    def along(param: Tensor) -> Shard:
        return Shard(1) if tuple(param.shape) == (WIDTH, 8) else Shard(0)

    for kind in RULES:
        check_fully_sharded(here, kind, 5, along)


@scenario
def data_parallel_equals_one_process(here: Here):
    model = DistributedDataParallel(Model())
    train(model, make_optimizer(model), range(5), own_rows(here))
    check_equal_to_one_process(model.module, "celo2", 5)


class Collectives(TorchDispatchMode):
    """Records (operation, elements that this process puts in) of every collective."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if "c10d" in function.namespace and not name.startswith(("wait", "_wrap")):
            sizes = [x.numel() for x in tree_leaves(args) if isinstance(x, Tensor)]
            self.seen.append((name, sum(sizes)))
        return function(*args, **(kwargs or {}))


def holder_of(here: Here, shape: tuple[int, ...], placement) -> nn.Module:
    """A module with a single parameter, and its gradient."""
    torch.manual_seed(0)
    holder = nn.Module()
    values, grad = (distribute_tensor(torch.randn(shape), here.mesh, [placement]) for _ in "12")
    holder.w = nn.Parameter(values)
    holder.w.grad = grad
    return holder


def collectives_of(here: Here, kind: str, *shape: int, axis: int = 0) -> list[tuple[str, int]]:
    """What the optimizer sends for one parameter."""
    optimizer = make_optimizer(holder_of(here, shape, Shard(axis)), kind)
    with Collectives() as collectives:
        optimizer.step()
    return collectives.seen


@scenario
def celo2_base_sends_rows_and_columns_only(here: Here):
    for axis, length in ((0, 96), (1, 64)):
        seen = collectives_of(here, "celo2_base", 64, 96, axis=axis)
        assert {name for name, _ in seen} == {"allreduce_"}, seen
        assert max(size for _, size in seen) == length, seen
    assert max(size for _, size in collectives_of(here, "celo2_base", 96)) <= 15  # its features


@scenario
def celo2_gathers_the_update_of_a_matrix_only(here: Here):
    seen = collectives_of(here, "celo2", 64, 96)
    gathers = [one for one in seen if one[0] != "allreduce_"]
    assert gathers == [("all_gather_into_tensor", 64 * 96 // 2)], seen
    assert max(size for name, size in seen if name == "allreduce_") == 96, seen
    assert collectives_of(here, "celo2", 96) == []  # AdamW's
    assert collectives_of(here, "celo2", 2, 32, 48) == []  # each process has a whole matrix


@scenario
def non_finite_gradient_on_one_process_skips_the_tensor_on_both(here: Here):
    model = sharded(here)
    optimizer = make_optimizer(model, weight_decay=0)
    train(model, optimizer, range(1), own_rows(here))
    bad, good = model.blocks[0].up.weight, model.blocks[1].up.weight
    before = [param.to_local().clone() for param in (bad, good)]
    momentum = optimizer.state[bad]["momentum_0"].to_local().clone()
    if here.rank == 1:
        bad.grad.to_local()[0, 0] = torch.nan
    optimizer.step()
    assert torch.equal(bad.to_local(), before[0])
    assert torch.equal(optimizer.state[bad]["momentum_0"].to_local(), momentum)
    assert (good.to_local() - before[1]).abs().max() > LR / 4
    assert whole(optimizer.state[bad]["skipped"]).tolist() == [[1]]
    assert whole(optimizer.state[good]["skipped"]).tolist() == [[0]]


@scenario
def resume_from_a_distributed_checkpoint_equals_an_uninterrupted_run(here: Here):
    model = sharded(here)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(3), own_rows(here))
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        dcp.save(state_of(model, optimizer, options), checkpoint_id=here.folder / f"{flatten}")
    train(model, optimizer, range(3, 6), own_rows(here))
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        resumed = sharded(here, seed=1)
        fresh = make_optimizer(resumed)
        state = state_of(resumed, fresh, options)
        dcp.load(state, checkpoint_id=here.folder / f"{flatten}")
        set_state_dict(
            resumed,
            fresh,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )
        train(resumed, fresh, range(3, 6), own_rows(here))
        for ours, expected in zip(resumed.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours.to_local(), expected.to_local())


def state_of(model: nn.Module, optimizer: Celo2, options: StateDictOptions) -> dict:
    parts = get_state_dict(model, optimizer, options=options)
    return dict(zip(("model", "optimizer"), parts, strict=True))


@scenario
def full_state_of_two_processes_goes_on_in_one(here: Here):
    model = sharded(here)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(3), own_rows(here))
    options = StateDictOptions(full_state_dict=True)
    parts = get_state_dict(model, optimizer, options=options)
    single = Model(seed=1)
    alone = make_optimizer(single)
    set_state_dict(
        single, alone, model_state_dict=parts[0], optim_state_dict=parts[1], options=options
    )
    train(single, alone, range(3, 5))
    check_equal_to_one_process(single, "celo2", 5)


def check_equal_to_plain(
    here: Here, shape: tuple[int, ...], placement, compile: bool = False, **options
) -> None:
    """Holds the steps on a DTensor, compiled or not, to eager ones on a plain tensor."""
    holder, plain = holder_of(here, shape, placement), nn.Module()
    plain.w = nn.Parameter(whole(holder.w.detach()).clone())
    plain.w.grad = whole(holder.w.grad).clone()
    for module in (holder, plain):
        optimizer = Celo2(module, LR, compile=compile and module is holder, **options)
        for _ in range(3):
            optimizer.step()
    torch.testing.assert_close(whole(holder.w), plain.w, rtol=1e-5, atol=1e-6)


@scenario
def replicated_parameter_is_updated_as_a_plain_one(here: Here):
    check_equal_to_plain(here, (8, 6), Replicate())


@scenario
def published_layout_of_a_sharded_stack_is_that_of_a_plain_one(here: Here):
    for shape in ((7, 5, 4), (3, 5, 4)):  # factored over the stack, and within its matrices
        check_equal_to_plain(here, shape, Shard(0), published=True)


@scenario
def compiled_passes_on_shards_equal_eager_ones_on_a_plain_tensor(here: Here):
    traced = []

    @functools.cache
    def trace_only(function):
        traced.append(function.__name__)
        return torch.compile(function, dynamic=True, fullgraph=True, backend="eager")

    module = celo2.torch.step
    found, module._compiled = module._compiled, trace_only
    try:
        check_equal_to_plain(here, (6, 4), Shard(0), compile=True, rule=make_rule(SMALL))
    finally:
        module._compiled = found
    # Between them processes add up what they have: that is not compiled.
    assert traced == ["absorb", "sums_of_squares", "apply_mlp"], traced


@scenario
def gradient_that_is_a_sum_to_be_made_is_made(here: Here):
    holder = holder_of(here, (8, 6), Shard(0))
    part = DTensor.from_local(torch.ones(8, 6), here.mesh, [Partial()])
    grad = aligned(part, holder.w)
    assert grad.placements == holder.w.placements
    assert torch.equal(grad.to_local(), torch.full((4, 6), 2.0))


@scenario
def uneven_folded_axis_is_refused(here: Here):
    transposed = MatrixView((), (0, 2), (1,))
    frame_of(holder_of(here, (4, 5, 2), Shard(0)).w, transposed)
    for shape, axis in (((3, 5, 2), 0), ((4, 5, 2), 2)):
        param = holder_of(here, shape, Shard(axis)).w
        try:
            frame_of(param, transposed)
        except ValueError as error:
            assert "shard it along" in str(error)
        else:
            raise AssertionError(f"{shape} was accepted")


@scenario
def flattened_parameters_are_refused(here: Here):
    for kept in (False, True):
        model = FullyShardedDataParallel(Model(), device_id=here.device, use_orig_params=kept)
        for params in (model, model.named_parameters(), model.parameters()):
            try:
                Celo2(params, LR)
            except ValueError as error:
                assert "fully_shard" in str(error)
            else:
                raise AssertionError(f"{kept=}: {type(params)} was accepted")


@scenario_of_four
def sharding_with_tensor_parallelism_equals_one_process(here: Here):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    rows = slice(2 * mesh["data"].get_local_rank(), 2 * mesh["data"].get_local_rank() + 2)

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = {"up": nn.Linear(8, 16), "relu": nn.ReLU(), "down": nn.Linear(16, 8)}
        return nn.Sequential(OrderedDict(layers))

    for kind in RULES:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(make(), mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
        kinds = [{type(p).__name__ for p in param.placements} for param in model.parameters()]
        assert {"_StridedShard", "Shard"} in kinds
        single = make()
        pairs = [(model, rows), (single, slice(None))]
        optimizers = [
            Celo2(m, LR, rule=RULES[kind], overrides={"weight": "rule"}) for m, _ in pairs
        ]
        for step in range(10):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            for (module, part), optimizer in zip(pairs, optimizers, strict=True):
                optimizer.zero_grad()
                module(x[part]).square().mean().backward()
                optimizer.step()
        for ours, expected in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(whole(ours), expected, rtol=1e-4, atol=1e-6)


def main() -> None:
    rank, processes, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="The state was saved with another rule")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), processes),
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=60),
    )
    here, report = Here(rank, processes, folder), {}
    name = ""
    try:
        for name in sys.argv[4:] or SCENARIOS[processes]:
            SCENARIOS[processes][name](here)
            report[name] = ""
    except Exception:
        # The others may be waiting for this process: whatever comes next would hang.
        report[name] = traceback.format_exc()
        raise
    finally:
        (folder / f"report_{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
