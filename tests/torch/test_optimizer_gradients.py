"""Bad and missing gradients in Torch; the twin of `tests/jax/test_optimizer_gradients.py`."""

import math

import pytest
import torch
from torch import Tensor, nn

from celo2.rule import LAST_COUNT
from celo2.torch import Celo2
from small import SMALL_BASE, make_rule

RULE = make_rule()
SHAPES = {"kernel": (4, 6), "stack": (3, 4, 6), "other": (4, 6)}
LR = 1e-2
COUNTS = ("moves", "skipped")


def normal(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: scale * torch.randn(s, generator=generator) for k, s in SHAPES.items()}


PARAMS = normal(1, 0.3)
GRADS = [normal(seed, 0.1) for seed in (2, 3)]


class Run:
    """An optimizer on the parameters above, some steps after its start."""

    def __init__(self, *grads: dict[str, Tensor], **options):
        self.params = {name: nn.Parameter(PARAMS[name].clone()) for name in (grads or GRADS)[0]}
        self.optimizer = Celo2(list(self.params.items()), LR, rule=RULE, **options)
        for grad in grads:
            self.last = self.update(grad)

    def update(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a step adds to parameters that are put back afterwards."""
        for name, param in self.params.items():
            param.data.copy_(PARAMS[name])
            param.grad = grads[name].clone()
        self.optimizer.step()
        return {name: param.detach() - PARAMS[name] for name, param in self.params.items()}

    def state(self, name: str) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in self.optimizer.state[self.params[name]].items()}

    def statistics(self, name: str) -> dict[str, Tensor]:
        return {k: v for k, v in self.state(name).items() if k not in COUNTS}


def put(x: Tensor, index, value: float) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_gradient_leaves_its_matrix_alone_and_is_counted(bad, foreach):
    run, good = (Run(GRADS[0], foreach=foreach) for _ in range(2))
    before = run.statistics("kernel")
    update = run.update(GRADS[1] | {"kernel": put(GRADS[1]["kernel"], (2, 3), bad)})
    good_update = good.update(GRADS[1])

    assert not update["kernel"].any()
    torch.testing.assert_close(run.statistics("kernel"), before, rtol=0, atol=0)
    state = run.state("kernel")
    assert state["skipped"] == 1 and state["moves"] == 1
    for name in ("stack", "other"):
        assert torch.equal(update[name], good_update[name])
        state = run.state(name)
        assert not state["skipped"].any() and (state["moves"] == 2).all()
    # Afterwards it goes on as if the step had not been.
    assert torch.equal(run.update(GRADS[1])["kernel"], good_update["kernel"])


def test_nonfinite_gradient_leaves_only_its_slice_of_a_stack_alone():
    run, good = Run(GRADS[0]), Run(GRADS[0])
    before = run.statistics("stack")
    update = run.update(GRADS[1] | {"stack": put(GRADS[1]["stack"], (1, 0, 0), math.nan)})
    good_update = good.update(GRADS[1])
    assert not update["stack"][1].any()
    assert torch.equal(update["stack"][::2], good_update["stack"][::2])
    for key, new in run.statistics("stack").items():
        slices = (x[:, 1] if key in ("rows", "cols") else x[1] for x in (new, before[key]))
        assert torch.equal(*slices), key
    assert run.state("stack")["skipped"].flatten().tolist() == [0, 1, 0]
    assert run.state("stack")["moves"].flatten().tolist() == [2, 1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nonfinite_gradient_in_half_precision_leaves_its_matrix_alone(dtype):
    param = nn.Parameter(PARAMS["kernel"].to(dtype))
    optimizer = Celo2([("kernel", param)], LR, rule=RULE)
    before = param.detach().clone()
    param.grad = put(GRADS[0]["kernel"].to(dtype), (0, 0), math.inf)
    optimizer.step()
    assert torch.equal(param, before) and optimizer.state[param]["skipped"] == 1


def test_tensor_holds_still_until_its_first_gradient():
    zero = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    late = GRADS[0] | {"kernel": zero["kernel"], "stack": put(GRADS[0]["stack"], 1, 0)}
    run = Run()
    update = run.update(late)
    assert not update["kernel"].any() and not update["stack"][1].any()
    assert update["other"].any() and update["stack"][0].any() and update["stack"][2].any()
    assert run.state("kernel")["moves"] == 0
    assert run.state("stack")["moves"].flatten().tolist() == [1, 0, 1]

    update = run.update(GRADS[1])
    assert update["kernel"].any() and update["stack"][1].any()
    update = run.update(zero)  # its momentum goes on
    assert all((x.abs().amax((-2, -1)) > 0).all() for x in update.values())


def test_smallest_gradient_counts_as_one():
    tiny = {name: torch.full(shape, 1e-37) for name, shape in SHAPES.items()}
    assert all(x.any() and x.isfinite().all() for x in Run().update(tiny).values())


def test_largest_gradients_are_clipped_and_give_finite_steps():
    large = {name: torch.full(shape, 1e38) for name, shape in SHAPES.items()}
    clipped = {name: torch.full(shape, 1e3) for name, shape in SHAPES.items()}
    torch.testing.assert_close(Run().update(large), Run().update(clipped), rtol=0, atol=0)


def test_largest_float64_gradient_is_not_taken_for_infinite():
    weight = nn.Parameter(torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6))
    before, optimizer = weight.detach().clone(), Celo2([("weight", weight)], LR, rule=RULE)
    weight.grad = torch.full_like(weight, 1e200)
    optimizer.step()
    assert weight.isfinite().all() and (weight != before).all()
    assert optimizer.skipped() == (0, 0)
    weight.grad[0, 0] = torch.inf
    optimizer.step()
    assert optimizer.skipped() == (1, 0)


def test_both_policies_can_be_switched_to_the_published_behaviour():
    zero = {"kernel": torch.zeros(4, 6)}
    infinite = {"kernel": put(GRADS[0]["kernel"], (0, 0), math.inf)}
    clipped = {"kernel": put(GRADS[0]["kernel"], (0, 0), 1000)}

    assert Run(zero, hold_unused=False).last["kernel"].any()
    run = Run(infinite, skip_nonfinite=False)
    assert torch.equal(run.last["kernel"], Run(clipped, skip_nonfinite=False).last["kernel"])
    assert run.state("kernel")["skipped"] == 0

    assert Run(zero, published=True).last["kernel"].any()
    assert Run(infinite, published=True).last["kernel"].any()


@pytest.mark.parametrize("setting", [{"hold_unused": False}, {"published": True}])
def test_policies_can_differ_between_groups(setting):
    params = [nn.Parameter(PARAMS["kernel"].clone()) for _ in range(2)]
    groups = [{"params": [("a", params[0])]}, {"params": [("b", params[1])]} | setting]
    optimizer = Celo2(groups, LR, rule=RULE)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(params[0], PARAMS["kernel"])
    assert not torch.equal(params[1], PARAMS["kernel"])


def test_count_does_not_overflow():
    run = Run(GRADS[0])
    for param in run.params.values():
        run.optimizer.state[param]["moves"].fill_(LAST_COUNT)
    update = run.update(GRADS[1])
    assert (run.state("stack")["moves"] == LAST_COUNT).all()
    assert all(x.any() for x in update.values())


@pytest.mark.parametrize("rule", [RULE, make_rule(SMALL_BASE)], ids=["adam", "rule"])
def test_sparse_gradient_is_refused_with_advice(rule):
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = Celo2(model, rule=rule)
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="0.weight's is sparse: make its embedding with sparse="):
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_nothing_moves_where_a_later_group_is_refused():
    params = [nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    groups = [{"params": [("a", params[0])]}, {"params": [("b", params[1])]}]
    optimizer = Celo2(groups, rule=RULE)
    params[0].grad, params[1].grad = torch.ones(3, 3), torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError, match="b's is sparse"):
        optimizer.step()
    assert torch.equal(params[0], torch.ones(3, 3)) and not optimizer.state
