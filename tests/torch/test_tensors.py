"""Tensors of any dtype, shape, memory layout and device in one optimizer."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from celo2.torch import Celo2, Celo2Base
from small import GATED, SMALL_BASE, make_rule
from torch_models import LR, RULE, assert_same, loss_of, make_model, parameter, rms, train


def test_foreach_equals_one_by_one():
    models = [make_model(), make_model()]
    for foreach, model in zip((None, False), models, strict=True):
        train(model, Celo2(model, LR, rule=RULE, foreach=foreach, weight_decay=0.1), 5)
    # A product of stacks rounds otherwise; small singular values show it most, within LR / 2,000.
    assert_same(*models, rtol=1e-5, atol=LR / 2_000)


def test_dtypes_and_shapes_can_be_mixed():
    kinds = torch.float32, torch.bfloat16, torch.float16, torch.float64
    shapes = (), (1,), (5,), (4, 6), (6, 4), (2, 3, 4), (0, 3), (4, 2, 3, 3)
    params = [parameter(*s, dtype=d) for d in kinds for s in shapes]
    before = [param.detach().clone() for param in params]
    optimizer = Celo2(params, LR, rule=make_rule(SMALL_BASE))
    alone = [parameter(*s, dtype=d) for d in kinds for s in shapes]
    for param in alone:
        Celo2([param], LR, rule=make_rule(SMALL_BASE), foreach=False).step()
    optimizer.step()
    for param, old, other in zip(params, before, alone, strict=True):
        assert param.dtype == old.dtype
        assert_same(param, other, rtol=1e-6, atol=1e-6)
        if param.numel() > 1:
            rel = 0.2 if param.dtype.itemsize == 2 else 1e-3
            assert rms(param - old) == pytest.approx(LR, rel=rel)


@pytest.mark.parametrize("lr", [LR, torch.tensor(LR)], ids=["float", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decay_and_step_of_half_precision_are_rounded_once(dtype, lr):
    half = parameter(16, 24, dtype=dtype)
    full = nn.Parameter(half.detach().float())
    full.grad = half.grad.float()
    for param in (half, full):
        # In half precision 1 - lr · weight_decay would be nearly 1.
        Celo2([("x", param)], lr, rule=RULE, weight_decay=0.1).step()
    assert_same(half, full.to(dtype))


@pytest.mark.parametrize("shape", [(), (0, 3), (0,), (3, 0)])
@pytest.mark.parametrize("updater", [None, "rule", "adam"])
def test_scalars_and_empty_tensors_are_no_trouble(shape, updater):
    param = parameter(*shape)
    before = param.detach().clone()
    optimizer = Celo2([{"params": [("x", param)], "updater": updater}], LR, rule=RULE)
    for _ in range(2):
        optimizer.step()
    assert param.isfinite().all() and (param.numel() == 0 or (param != before).all())
    assert all(x.isfinite().all() for state in optimizer.state.values() for x in state.values())


@pytest.mark.parametrize("foreach", [None, False])
def test_memory_layout_does_not_matter(foreach):
    layouts = [
        lambda x: x,
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0),
        lambda x: torch.stack([x, x], -1)[..., 0],
    ]
    results = []
    for layout in layouts:
        torch.manual_seed(0)
        start, grads = torch.randn(4, 3, 2, 2), torch.randn(3, 4, 3, 2, 2)
        params = [nn.Parameter(layout(start.clone())) for _ in range(2)]
        strides = params[0].stride()
        optimizer = Celo2(list(zip("ab", params, strict=True)), LR, rule=RULE, foreach=foreach)
        for grad in grads:
            for param in params:
                param.grad = layout(grad.clone())
            optimizer.step()
        assert params[0].stride() == strides
        results.append([params, [optimizer.state[param] for param in params]])
    for params, states in results[1:]:
        for ours, expected in zip((params, states), results[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, check_stride=False)


def test_parameters_of_several_devices_go_together():
    here, elsewhere = parameter(4, 6), nn.Parameter(torch.zeros(4, 6, device="meta"))
    vector = nn.Parameter(torch.zeros(3, device="meta"))
    elsewhere.grad, vector.grad = (torch.empty_like(p) for p in (elsewhere, vector))
    alone = copy.deepcopy(here)
    alone.grad = here.grad
    Celo2([("a", alone)], LR, rule=RULE).step()
    optimizer = Celo2([("a", here), ("b", elsewhere), ("c", vector)], LR, rule=RULE)
    optimizer.step()
    assert_same(here, alone)
    assert all(x.is_meta for x in optimizer.state[elsewhere].values())


class NoSync(TorchDispatchMode):
    """Refuses what makes the host wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("tensor", [False, True])
def test_step_never_waits_for_the_device(foreach, tensor, nesterov, capturable):
    model, lr = make_model(), torch.tensor(LR) if tensor else LR
    options = {"adam_nesterov": nesterov, "foreach": foreach, "capturable": capturable}
    optimizer = Celo2(model, lr, rule=RULE, weight_decay=0.1, **options)
    for _ in range(2):
        model.zero_grad()
        loss_of(model).backward()
        with NoSync():
            optimizer.step()
    theirs = torch.optim.AdamW(model.parameters())
    theirs.step()
    with NoSync(), pytest.raises(AssertionError, match="_local_scalar_dense waits"):
        theirs.step()  # what the mode is for


FREE = ("empty", "view", "squeeze", "select", "slice", "permute", "transpose", "expand", "unbind")
FREE += ("detach", "alias", "as_strided", "diagonal", "split", "device", "record_function")


class Operations(TorchDispatchMode):
    """Notes what is dispatched to a device, but for views and allocations."""

    def __init__(self):
        super().__init__()
        self.seen, self.from_host = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name != "t" and not any(free in name for free in FREE):
            self.seen.append(name)
            on_host = (x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor))
            if any(x.device.type == "cpu" and x.ndim > 0 for x in on_host):
                self.from_host.append(name)
        return func(*args, **(kwargs or {}))


WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"}


def gpt_on_a_gpu(layers: int, width: int, context: int) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a GPT, with gradients, on a device that need not be there."""
    shapes = {"wte.weight": (50257, width), "wpe.weight": (context, width)}
    sizes = {"attn.c_attn": (3, 1), "attn.c_proj": (1, 1), "mlp.c_fc": (4, 1), "mlp.c_proj": (1, 4)}
    for i in range(layers):
        for name, (rows, columns) in sizes.items():
            shapes[f"h.{i}.{name}.weight"] = rows * width, columns * width
            shapes[f"h.{i}.{name}.bias"] = (rows * width,)
        shapes |= {f"h.{i}.ln_{j}.{kind}": (width,) for j in "12" for kind in ("weight", "bias")}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    params = {name: nn.Parameter(torch.zeros(s, device="cuda")) for name, s in shapes.items()}
    for param in params.values():
        param.grad = torch.zeros_like(param)
    return list(params.items())


@pytest.mark.parametrize(
    ("kind", "size", "most"),
    [
        (Celo2, (12, 768, 1024), 1_300),  # GPT-2, 124M; torch.optim.Muon takes 1,104 for its part
        (Celo2Base, (12, 768, 1024), 1_500),
        (functools.partial(Celo2, rule=make_rule(GATED)), (12, 768, 1024), 1_300),
        pytest.param(Celo2, (24, 2048, 2048), 8_000, marks=pytest.mark.slow),  # 1.3B
    ],
)
def test_step_takes_few_operations_on_an_accelerator(kind, size, most):
    with FakeTensorMode():
        optimizer = kind(gpt_on_a_gpu(*size))
        optimizer.step()
        with Operations() as operations:
            optimizer.step()
    assert len(operations.seen) <= most and not WAITS & set(operations.seen)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Celo2, {"weight_decay": 0.1, "adam_nesterov": False}),
        (Celo2, {"foreach": False, "published": True, "adam_nesterov": True, "maximize": True}),
        (Celo2Base, {"momentum_dtype": torch.bfloat16, "workspace": 4000}),
    ],
    ids=["celo2", "one by one", "celo2-base"],
)
def test_a_captured_step_would_replay_the_next_ones(kind, options):
    """A CUDA graph holds one step's launches; a fake tensor has no value to decide anything by."""
    shapes = {"a.weight": (6, 4), "b.weight": (6, 4), "experts": (2, 3, 5), "a.bias": (6,)}
    with FakeTensorMode():
        params = [(n, nn.Parameter(torch.zeros(s, device="cuda"))) for n, s in shapes.items()]
        lr = torch.tensor(LR, device="cuda")
        optimizer = kind(params, lr, capturable=True, **options)
        steps = []
        for _ in range(3):
            for _, param in params:
                param.grad = torch.zeros_like(param)
            with Operations() as operations:
                optimizer.step()
            steps.append(operations)
    assert steps[1].seen == steps[2].seen and len(steps[1].seen) > 50
    assert steps[0].from_host and not steps[1].from_host  # the rule's weights are sent once
    assert not WAITS & set(steps[1].seen)
