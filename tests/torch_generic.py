"""Celo2 described as PyTorch describes its own optimizers, for the checks it makes of them all."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from celo2.torch import Celo2, Celo2Base

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")

from torch.testing._internal.common_optimizers import (  # noqa: E402
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    get_error_inputs_for_all_optims,
)


def inputs(device, dtype=None) -> list[OptimizerInput]:
    settings = {
        "default": {},
        "non-default lr": {"lr": 1e-3},
        "Tensor lr": {"lr": torch.tensor(1e-3)},
        "weight decay": {"weight_decay": 0.1},
        "maximize": {"weight_decay": 0.1, "maximize": True},
        "rms scale": {"rms_scale": 0.2, "lr": 2e-3},
        "spectral scale": {"scale": "spectral", "weight_decay": 0.1},
        "slower AdamW": {"adam_multiplier": 1.0, "betas": (0.8, 0.9), "eps": 1e-6},
        "Nesterov AdamW": {"adam_nesterov": True, "weight_decay": 0.1},
        "half precision": {"momentum_dtype": torch.bfloat16, "newton_schulz_dtype": torch.bfloat16},
        "published": {"published": True},
    }
    return [OptimizerInput(None, kwargs, desc) for desc, kwargs in settings.items()]


def error_inputs(device, dtype) -> list[ErrorOptimizerInput]:
    found = get_error_inputs_for_all_optims(device, dtype)
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
