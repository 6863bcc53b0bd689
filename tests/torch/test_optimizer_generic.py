"""The checks that PyTorch makes of every optimizer, on inputs described as PyTorch describes them.

`torch.testing._internal.common_optimizers` holds the descriptions, the errors that all optimizers
share and some tools; the checks themselves are not in the wheel and are written anew here, under
PyTorch's names for them.
"""

import copy
import inspect
import unittest

import pytest
import torch
from torch import Tensor, nn

from torch_generic import Problem, all_kwargs, every_info  # first: it skips without expecttest

from torch.testing._internal.common_optimizers import (  # isort: skip
    OptimizerErrorEnum,
    OptimizerInfo,
    TensorTracker,
)

# PyTorch's checks give no names.
pytestmark = pytest.mark.filterwarnings("ignore:Celo2 got parameters without names")


# What PyTorch's checks vary by themselves, and what has tests of its own.
VARIED = {"foreach", "capturable"}
TESTED_ELSEWHERE = {
    "rule",
    "overrides",
    "skip_nonfinite",
    "hold_unused",
    "workspace",
    "kernel",
    "compile",
}


@every_info
def test_every_setting_passes_through_the_checks(info):
    settings = inspect.signature(info.optim_cls).parameters.keys() - {"params"}
    described = {name for one in info.optim_inputs_func("cpu") for name in one.kwargs}
    assert settings == described | VARIED | TESTED_ELSEWHERE
    assert not described & (VARIED | TESTED_ELSEWHERE)


@every_info
def test_errors(info):
    found = info.optim_error_inputs_func("cpu", torch.float32)
    assert len(found) == 10
    for error in found:
        one = error.optimizer_error_input
        if error.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR:
            warns = issubclass(error.error_type, Warning)
            expect = pytest.warns if warns else pytest.raises
            with expect(error.error_type, match=error.error_regex):
                info.optim_cls(one.params, **one.kwargs)
        else:
            optimizer = info.optim_cls(one.params, **one.kwargs)
            with pytest.raises(error.error_type, match=error.error_regex):
                optimizer.step()


@every_info
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_forloop_goes_right_direction(info, contiguous, scheduled):
    for makers in info.scheduler_inputs if scheduled else [[]]:
        for one in info.optim_inputs_func("cpu"):
            problem = Problem(contiguous)
            optimizer = info.optim_cls(problem.params, **one.kwargs, foreach=False)
            schedulers = [make(optimizer) for make in makers]
            problem.check_direction(optimizer, one.kwargs.get("maximize", False), schedulers)


@every_info
def test_param_group_with_lrscheduler_goes_right_direction(info):
    for makers in info.scheduler_inputs:
        problem = Problem()
        groups = [{"params": [problem.weight]}, {"params": [problem.bias], "lr": 1e-3}]
        optimizer = info.optim_cls(groups)
        problem.check_direction(optimizer, schedulers=[make(optimizer) for make in makers])


@every_info
def test_tensor_lr(info):
    for kwargs in all_kwargs(info):
        problems = Problem(), Problem()
        for lr, problem in zip((1e-3, torch.tensor(1e-3)), problems, strict=True):
            optimizer = info.optim_cls(problem.params, **kwargs | {"lr": lr})
            for _ in range(5):
                problem.loss()
                optimizer.step()
        torch.testing.assert_close(problems[0].params, problems[1].params)


class Case(unittest.TestCase):
    """What a TensorTracker wants: a TestCase that can compare tensors."""

    def assertEqual(self, first, second, msg=None, **tolerance):
        torch.testing.assert_close(first, second, **tolerance)


def check_foreach(info: OptimizerInfo, kwargs: dict, dtype: torch.dtype) -> None:
    """Trains a model with and without foreach, with layers and whole steps left out at times."""
    models, optimizers = [], []
    for foreach in (False, True):
        torch.manual_seed(1)
        layers = nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1)
        models.append(nn.Sequential(*layers).to(dtype))
        scalar = torch.zeros((), dtype=dtype, requires_grad=True)
        scalar.grad = torch.ones_like(scalar)
        params = [*models[-1].parameters(), scalar]
        optimizers.append(info.optim_cls(params, **kwargs, foreach=foreach))
    x = torch.linspace(0.1, 0.6, 6, dtype=dtype).reshape(3, 2)
    tracker, case = TensorTracker({"rtol": 1e-5, "atol": 1e-6}), Case()
    for step in range(7):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model[2].requires_grad_(step not in (3, 4))
            if step != 2:
                model(x).sum().backward()
            optimizer.step()
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            states = [opt.state[p] for opt, p in zip(optimizers, (ours, theirs), strict=True)]
            assert states[0].keys() == states[1].keys()
            tracker.add(ours)
            tracker.pop_check_set(theirs, case)
            for name, value in states[0].items():
                tracker.add(value)
                tracker.pop_check_set(states[1][name], case)
        assert tracker.all_popped()


@every_info
def test_foreach_matches_forloop(info):
    for one in info.optim_inputs_func("cpu"):
        if not isinstance(one.kwargs.get("lr"), Tensor):
            check_foreach(info, one.kwargs, torch.float64)


@every_info
@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_set_default_dtype_works_with_foreach(info, default):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        check_foreach(info, {}, torch.float64)
    finally:
        torch.set_default_dtype(before)


@every_info
def test_mixed_device_dtype(info):
    """On one device; PyTorch's own takes two GPUs."""
    dtypes = torch.float64, torch.float32, torch.float16, torch.bfloat16
    for one in info.optim_inputs_func("cpu"):
        if isinstance(one.kwargs.get("lr"), Tensor):
            continue
        both = []
        for foreach in (False, True):
            torch.manual_seed(0)
            params = [torch.rand(2, 3).to(dtype).requires_grad_() for dtype in dtypes * 2]
            for param in params:
                param.grad = torch.rand(2, 3).to(param.dtype)
            optimizer = info.optim_cls(params, **one.kwargs, foreach=foreach)
            for _ in range(3):
                optimizer.step()
            both.append((params, [optimizer.state[param] for param in params]))
        torch.testing.assert_close(*both)


@every_info
def test_param_groups_weight_decay(info):
    for kwargs in all_kwargs(info):
        problem = Problem()
        optimizer = info.optim_cls(
            [
                {"params": [problem.weight]} | kwargs,
                {"params": [problem.bias]} | kwargs | {"weight_decay": 0.0},
            ]
        )
        problem.check_direction(optimizer, kwargs.get("maximize", False))


@every_info
def test_param_groups_lr(info):
    for kwargs in all_kwargs(info):
        problem, still = Problem(), nn.Parameter(torch.ones(2))
        groups = [{"params": problem.params} | {"lr": 1e-3} | kwargs, {"params": [still]}]
        still.grad = torch.ones(2)
        problem.check_direction(info.optim_cls(groups, lr=1e-28), kwargs.get("maximize", False))
        assert torch.equal(still, torch.ones(2))


@every_info
def test_step_is_noop_when_params_have_no_grad(info):
    params = [torch.randn(2, 3) for _ in range(2)]
    before = copy.deepcopy(params)
    for kwargs in all_kwargs(info):
        assert info.optim_cls(params, **kwargs).step(lambda: torch.ones(1)) == 1
        assert all(map(torch.equal, params, before))


@every_info
def test_step_is_noop_for_zero_grads(info):
    param = torch.randn(5, 1, requires_grad=True)
    before = param.detach().clone()
    for kwargs in all_kwargs(info):
        # The published rule moves such a matrix: that is what `hold_unused` is for.
        if not kwargs.get("weight_decay") and not kwargs.get("published"):
            optimizer = info.optim_cls([param], **kwargs)
            param.grad = torch.zeros_like(param)
            optimizer.step()
            assert torch.equal(param, before)


@every_info
def test_optimizer_can_be_printed(info):
    for kwargs in all_kwargs(info):
        assert repr(info.optim_cls(Problem().params, **kwargs)).startswith(f"{info.name} (")
