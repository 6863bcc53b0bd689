"""What is sent and computed for single sharded tensors, and which are refused."""

import functools

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import celo2.torch.grouping
from celo2.routing import MatrixView
from celo2.torch import Celo2
from celo2.torch.tensors import aligned, frame_of
from small import SMALL, make_rule
from torch_world import LR, RULES, Here, Model, make_optimizer, scenario, whole


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
def vector_shaped_to_be_broadcast_is_updated_as_a_plain_one(here: Here):
    base = RULES["celo2_base"]
    for shape, axis in (((1, 1, 6), 0), ((1, 1, 6), 1), ((1, 1, 5), 2), ((5, 1, 1), 0)):
        check_equal_to_plain(here, shape, Shard(axis), rule=base, weight_decay=0.1)
    optimizer = make_optimizer(holder_of(here, (1, 1, 6), Shard(0)), "celo2_base")
    optimizer.step()
    (state,) = optimizer.state.values()
    assert state["rows"].to_local().shape == (3, 1 - here.rank, 6)
    assert whole(state["rows"]).shape == (3, 1, 6) and whole(state["rows"]).all()


@scenario
def non_finite_gradient_is_zero_for_a_sharded_adam(here: Here):
    holder = holder_of(here, (6,), Shard(0))
    before = holder.w.to_local().clone()
    if here.rank == 1:
        holder.w.grad.to_local()[0] = torch.nan
    make_optimizer(holder, weight_decay=0).step()
    moved = (holder.w.to_local() != before).tolist()
    assert moved == [here.rank == 0, True, True]


@scenario
def compiled_passes_on_shards_equal_eager_ones_on_a_plain_tensor(here: Here):
    traced = []

    @functools.cache
    def trace_only(function):
        traced.append(function.__name__)
        return torch.compile(function, dynamic=True, fullgraph=True, backend="eager")

    module = celo2.torch.grouping
    found, module._compiled = module._compiled, trace_only
    try:
        check_equal_to_plain(here, (6, 4), Shard(0), compile=True, rule=make_rule(SMALL))
    finally:
        module._compiled = found
    # Between them processes add up what they have: that is not compiled.
    assert traced == ["absorb", "run_units"], traced


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
