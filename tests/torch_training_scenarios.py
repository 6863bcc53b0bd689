"""A whole model trained in several processes equals one trained in a single one."""

from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from celo2.torch import Celo2
from torch_world import (
    LR,
    RULES,
    WIDTH,
    Here,
    Model,
    check_equal_to_one_process,
    check_fully_sharded,
    make_optimizer,
    own_rows,
    scenario,
    scenario_of_four,
    sharded,
    train,
    whole,
)


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
        # Newton–Schulz raises small singular values a hundredfold, and rounding with them.
        for ours, expected in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(whole(ours), expected, rtol=1e-4, atol=1e-3 * LR)
