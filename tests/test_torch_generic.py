"""The checks that PyTorch makes of every optimizer, on inputs described as PyTorch describes them.

`torch.testing._internal.common_optimizers` holds the descriptions, the errors that all optimizers
share and some tools; the checks themselves are not in the wheel and are written anew here, under
PyTorch's names for them.
"""

import copy
import io
import itertools
import unittest

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from celo2.torch import Celo2, Celo2Base

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")

from torch.testing._internal.common_optimizers import (  # noqa: E402
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    TensorTracker,
    _get_optim_inputs_including_global_cliquey_kwargs,
    get_error_inputs_for_all_optims,
)

# PyTorch's checks give no names.
pytestmark = pytest.mark.filterwarnings("ignore:Celo2 got parameters without names")


def inputs(device, dtype=None) -> list[OptimizerInput]:
    settings = {
        "default": {},
        "non-default lr": {"lr": 1e-3},
        "Tensor lr": {"lr": torch.tensor(1e-3)},
        "weight decay": {"weight_decay": 0.1},
        "maximize": {"weight_decay": 0.1, "maximize": True},
        "rms scale": {"rms_scale": 0.2, "lr": 2e-3},
        "slower AdamW": {"adam_multiplier": 1.0, "betas": (0.8, 0.9), "eps": 1e-6},
        "half precision": {"momentum_dtype": torch.bfloat16, "newton_schulz_dtype": torch.bfloat16},
        "published": {"published": True},
    }
    return [OptimizerInput(None, kwargs, desc) for desc, kwargs in settings.items()]


def error_inputs(device, dtype) -> list[ErrorOptimizerInput]:
    found = get_error_inputs_for_all_optims(device, dtype)
    for one in found:
        if one.error_type is UserWarning:
            # Torch still only warns of duplicates in a group.
            assert "duplicate" in one.error_regex
            one.error_type = ValueError
    complex_param = torch.zeros(2, 2, dtype=torch.complex64)
    sparse = torch.zeros(3, dtype=dtype)
    sparse.grad = torch.ones(3).to_sparse()
    at_step = OptimizerErrorEnum.STEP_ERROR
    for params, kwargs, error, regex, when in (
        (None, {"betas": (1.0, 0.0)}, ValueError, r"betas=\(1.0, 0.0\)", None),
        (None, {"weight_decay": -1}, ValueError, "weight_decay=-1", None),
        ([complex_param], {}, TypeError, "parameter 0 is torch.complex64", None),
        ([sparse], {}, RuntimeError, "parameter 0's is sparse", at_step),
    ):
        options = {"error_on": when} if when else {}
        one = OptimizerInput(params, kwargs)
        found.append(ErrorOptimizerInput(one, error_type=error, error_regex=regex, **options))
    return found


INFOS = [
    OptimizerInfo(
        cls,
        optim_inputs_func=inputs,
        optim_error_inputs_func=error_inputs,
        supported_impls=("foreach",),
        not_og_supported_flags=("foreach", "maximize", "capturable"),
        has_capturable_arg=True,
        supports_complex=False,
    )
    for cls in (Celo2, Celo2Base)
]
every_info = pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
in_both_ways = pytest.mark.parametrize("named", list(itertools.product([True, False], repeat=2)))


def all_kwargs(info: OptimizerInfo) -> list[dict]:
    """The settings of every input, by turns with and without foreach."""
    found = _get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info)
    # Torch makes it only for devices with foreach kernels.
    turns = itertools.cycle([True, False])
    return [one.kwargs | {"foreach": foreach} for one, foreach in zip(found, turns, strict=False)]


class Problem:
    """A line through the origin that is to be fitted to zeros."""

    def __init__(self, contiguous: bool = True, sizes: tuple[int, int] = (10, 5)):
        torch.manual_seed(0)
        rows, columns = sizes
        if contiguous:
            weight, bias = torch.randn(rows, columns), torch.randn(rows)
        else:
            weight, bias = torch.randn(rows, columns, 2)[..., 0], torch.randn(rows, 2)[..., 0]
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.x = torch.randn(columns)

    @property
    def params(self) -> list[nn.Parameter]:
        return [self.weight, self.bias]

    def loss(self) -> Tensor:
        """With fresh gradients."""
        self.weight.grad = self.bias.grad = None
        loss = (self.weight.mv(self.x) + self.bias).square().sum()
        loss.backward()
        return loss.detach()

    def check_direction(self, optimizer, maximize=False, schedulers=(), steps=20) -> None:
        before = self.loss().item()
        for _ in range(steps):
            loss = self.loss()
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step(*[loss] if isinstance(scheduler, ReduceLROnPlateau) else [])
        assert self.loss().item() > before if maximize else self.loss().item() < before


def with_names(params, named: bool) -> list:
    return [(f"name{i}", p) for i, p in enumerate(params)] if named else list(params)


def without_names(content: dict) -> dict:
    content = copy.deepcopy(content)
    for group in content["param_groups"]:
        group.pop("param_names", None)
    return content


def assert_same_content(a: dict, b: dict) -> None:
    torch.testing.assert_close(a["state"], b["state"], rtol=0, atol=0)
    assert a["param_groups"] == b["param_groups"]


@every_info
def test_optim_infos_do_not_specify_global_cliquey_kwargs(info):
    flags = {"foreach", "fused", "differentiable"}
    assert not any(flags & one.kwargs.keys() for one in info.optim_inputs_func("cpu"))


@every_info
def test_errors(info):
    found = info.optim_error_inputs_func("cpu", torch.float32)
    assert len(found) == 10
    for error in found:
        one = error.optimizer_error_input
        if error.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR:
            with pytest.raises(error.error_type, match=error.error_regex):
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


@every_info
@in_both_ways
def test_state_dict_deterministic(info, named):
    for kwargs in all_kwargs(info):
        problem = Problem(sizes=(2, 3))
        optimizer = info.optim_cls(with_names(problem.params, named[0]), **kwargs)
        for _ in range(3):
            problem.loss()
            optimizer.step()
        other = copy.deepcopy(problem)
        fresh = info.optim_cls(with_names(other.params, named[1]), **kwargs)
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(3):
            for p, o in ((problem, optimizer), (other, fresh)):
                p.loss()
                o.step()
            assert all(map(torch.equal, problem.params, other.params))
        ours, theirs = (without_names(o.state_dict()) for o in (optimizer, fresh))
        assert_same_content(ours, theirs)
        # Parameters that come twice are numbered as if they came once.
        fresh.param_groups.extend(fresh.param_groups)
        again = without_names(fresh.state_dict())
        assert again["param_groups"][-1] == ours["param_groups"][-1]


@every_info
@pytest.mark.parametrize("older", [True, False])
@in_both_ways
def test_can_load_from_to_named_state_dict(info, named, older):
    """With `older` it is test_can_load_older_state_dict: newer settings are missing."""
    model = nn.Sequential(nn.Conv2d(4, 2, 1, stride=2), nn.BatchNorm2d(2))
    x = torch.rand(1, 4, 8, 8)
    for kwargs in all_kwargs(info):
        contents, names = {}, ["0.weight", "0.bias", "1.weight", "1.bias"]
        for is_named in named:
            params = model.named_parameters() if is_named else model.parameters()
            optimizer = info.optim_cls(params, **kwargs)
            if contents:
                optimizer.load_state_dict(contents)
            for _ in range(2):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            contents = copy.deepcopy(optimizer.state_dict())
            for flag in info.not_og_supported_flags if older else ():
                del contents["param_groups"][0][flag]
        if any(named):
            assert contents["param_groups"][0]["param_names"] == names


@every_info
@pytest.mark.parametrize("named", [True, False])
def test_save_load_equality_with_weights_only(info, named):
    for kwargs in all_kwargs(info):
        problem = Problem(sizes=(2, 3))
        optimizer = info.optim_cls(with_names(problem.params, named), **kwargs)
        for _ in range(3):
            problem.loss()
            optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        assert_same_content(torch.load(file, weights_only=True), optimizer.state_dict())


@every_info
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_state_dict_pre_post_hook(info, before, after):
    optimizer = info.optim_cls(Problem().params)
    if before:
        optimizer.register_state_dict_pre_hook(lambda opt: opt.state.update(test=1))
    if after:
        optimizer.register_state_dict_post_hook(
            lambda opt, content: content | {"seen": content["state"].pop("test", None)}
        )
    content = optimizer.state_dict()
    assert content.get("seen") == (1 if before and after else None)
    assert ("test" in content["state"]) == (before and not after)


@every_info
def test_load_state_dict_pre_hook_and_prepend(info):
    optimizer = info.optim_cls(Problem().params)
    content = optimizer.state_dict()

    def change(opt, content):
        content["param_groups"][0]["lr"] = 0.002

    def replace(opt, content):
        content = copy.deepcopy(content)
        content["param_groups"][0]["lr"] = 0.003
        return content

    optimizer.register_load_state_dict_pre_hook(change)
    optimizer.load_state_dict(content)
    assert optimizer.param_groups[0]["lr"] == 0.002
    handle = optimizer.register_load_state_dict_pre_hook(replace, prepend=True)
    optimizer.load_state_dict(content)
    assert optimizer.param_groups[0]["lr"] == 0.002
    handle.remove()
    # test_load_state_dict_post_hook and test_load_state_dict_pre_post_hook
    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.register_load_state_dict_post_hook(
        lambda opt: opt.state.update(seen=opt.param_groups[0]["lr"])
    )
    optimizer.load_state_dict(content)
    assert optimizer.state["seen"] == 0.003


@every_info
def test_step_all_hooks(info):
    """And test_step_pre_hook, test_step_post_hook."""
    params, calls = [torch.ones(2)], []
    for kwargs in all_kwargs(info):
        calls.clear()
        optimizer, other = info.optim_cls(params, **kwargs), torch.optim.SGD(params)
        handles = [
            register_optimizer_step_pre_hook(lambda *_: calls.append(0)),
            register_optimizer_step_post_hook(lambda *_: calls.append(3)),
            *(o.register_step_pre_hook(lambda *_: calls.append(1)) for o in (optimizer, other)),
            *(o.register_step_post_hook(lambda *_: calls.append(2)) for o in (optimizer, other)),
        ]
        for one in (optimizer, other, optimizer):
            one.step()
        assert calls == [0, 1, 2, 3] * 3
        for handle in handles:
            handle.remove()
        optimizer.step()
        assert calls == [0, 1, 2, 3] * 3


@every_info
def test_deepcopy_copies_all_public_attrs(info):
    def attributes(optimizer):
        return {name for name in vars(optimizer) if not name.startswith("_")}

    for kwargs in all_kwargs(info):
        problem = Problem()
        optimizer = info.optim_cls(problem.params, **kwargs)
        problem.loss()
        optimizer.step()
        assert attributes(copy.deepcopy(optimizer)) == attributes(optimizer)


@every_info
def test_non_empty_state(info):
    for one in info.optim_inputs_func("cpu"):
        problem = Problem()
        optimizer = info.optim_cls(problem.params, **one.kwargs)
        problem.loss()
        optimizer.step()
        assert len(optimizer.state) == 2 and all(optimizer.state.values())
