"""What an optimizer step costs on one GPU: AdamW, Muon and Celo2 on the parameters of GPT-2 124M.

    python benchmarks/torch_gpu.py [--steps 20] [--dtype float32] [--operations] [--json]

Prints milliseconds of a step (CUDA events, median), operations dispatched to the device (views and
allocations left out; a compiled or Triton launch counts as one) and the most memory that a step
takes beside parameters, gradients and state. Muon moves the matrices of the layers only, and AdamW
the rest. Without a GPU, `--operations` counts what would be dispatched, on fake tensors.
"""

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from celo2.torch import Celo2, Celo2Base

LAYERS, WIDTH, CONTEXT, VOCABULARY = 12, 768, 1024, 50257
FREE = ("empty", "view", "squeeze", "select", "slice", "permute", "transpose", "expand", "unbind")
FREE += ("detach", "alias", "as_strided", "diagonal", "split", "device", "record_function")
MIX = Path(__file__).parents[1] / "rules" / "celo2-mix.safetensors"  # without gate, overshoot
BFLOAT16 = {"newton_schulz_dtype": torch.bfloat16}


class Operations(TorchDispatchMode):
    """Counts dispatched operations, and those that make the host wait."""

    def __init__(self):
        super().__init__()
        self.count, self.waits = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.waits += name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
        self.count += not any(free in name for free in FREE) and name != "t"
        return function(*args, **(kwargs or {}))


def gpt_shapes(layers: int, width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a GPT without its table of positions: named as transformers has them, stored
    as Linear weights.
    """
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, width)}
    sizes = {"attn.c_attn": (3, 1), "attn.c_proj": (1, 1), "mlp.c_fc": (4, 1), "mlp.c_proj": (1, 4)}
    for i in range(layers):
        for name, (rows, columns) in sizes.items():
            shapes[f"h.{i}.{name}.weight"] = rows * width, columns * width
            shapes[f"h.{i}.{name}.bias"] = (rows * width,)
        shapes |= {f"h.{i}.ln_{j}.{kind}": (width,) for j in "12" for kind in ("weight", "bias")}
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def gpt2(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """GPT-2 124M's parameters, with gradients."""
    shapes = gpt_shapes(LAYERS, WIDTH, VOCABULARY) | {"wpe.weight": (CONTEXT, WIDTH)}
    params = {}
    for name, shape in shapes.items():
        params[name] = nn.Parameter(0.02 * torch.randn(shape, device="cuda", dtype=dtype))
        params[name].grad = 0.02 * torch.randn(shape, device="cuda", dtype=dtype)
    return params


class MuonAndAdamW:
    """Muon on the layers' matrices, AdamW on the rest."""

    def __init__(self, params):
        hidden = {n for n, p in params if p.ndim == 2 and n.startswith("h.")}
        self.parts = [
            torch.optim.Muon([p for n, p in params if n in hidden]),
            torch.optim.AdamW([p for n, p in params if n not in hidden]),
        ]

    def step(self) -> None:
        for part in self.parts:
            part.step()


CONTENDERS = {
    "adamw": lambda params: torch.optim.AdamW([p for _, p in params]),
    "muon + adamw": MuonAndAdamW,
    "celo2-base eager": lambda params: Celo2Base(params, kernel="eager"),
    "celo2-base triton": lambda params: Celo2Base(params, kernel="triton"),
    "celo2-base compiled": lambda params: Celo2Base(params, compile=True),
    "celo2 eager": lambda params: Celo2(params, kernel="eager"),
    "celo2 mix eager": lambda params: Celo2(params, rule=MIX, kernel="eager"),
    "celo2 mix triton": lambda params: Celo2(params, rule=MIX, kernel="triton"),
    "celo2 triton": lambda params: Celo2(params, kernel="triton"),
    "celo2 triton bf16": lambda params: Celo2(params, kernel="triton", **BFLOAT16),
    "celo2 compiled bf16": lambda params: Celo2(params, compile=True, **BFLOAT16),
}


def measure(name: str, steps: int, dtype: torch.dtype, fake: bool) -> dict:
    torch.manual_seed(0)
    with FakeTensorMode() if fake else contextlib.nullcontext():
        optimizer = CONTENDERS[name](list(gpt2(dtype).items()))
        start = time.perf_counter()
        optimizer.step()
        with Operations() as operations:
            optimizer.step()
        row = {"optimizer": name, "operations": operations.count, "waits": operations.waits}
        if fake:
            return row
    torch.cuda.synchronize()
    row["first_seconds"] = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    held, times = torch.cuda.memory_allocated(), []
    for _ in range(steps):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        optimizer.step()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    row["ms"] = statistics.median(times)
    row["extra_mb"] = (torch.cuda.max_memory_allocated() - held) / 2**20
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--operations", action="store_true", help="count only, without a GPU")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not (args.operations or torch.cuda.is_available()):
        parser.error("there is no GPU here: --operations counts without one.")
    names = [n for n in CONTENDERS if not args.operations or "eager" in n or "celo2" not in n]
    rows = [measure(n, args.steps, getattr(torch, args.dtype), args.operations) for n in names]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    columns = list(rows[0])
    print(" ".join(f"{column:>20}" for column in columns))
    for row in rows:
        print(" ".join(f"{v:20.1f}" if isinstance(v, float) else f"{v:>20}" for v in row.values()))


if __name__ == "__main__":
    main()
