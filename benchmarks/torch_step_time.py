"""What an optimizer step costs in PyTorch: Celo2 and Celo2-base against AdamW and Muon.

    python benchmarks/torch_step_time.py [--rounds 7] [--eager] [--json]

The shapes are those of a GPT with 9.5M parameters in 75 tensors; "hidden" is the 9.3M of the
layers' matrices. All optimizers step in turn in one process with one thread, so that other load
hits them alike. torch.optim.Muon multiplies matrices in bfloat16; "muon float32" is the same in
float32. Celo2 multiplies in bfloat16 where it says bf16 and in float32 elsewhere; its rule is the
shipped one, and "mix" is one without gate and overshoot. The extra memory of a step is what its
operations allocate and have alive at a time, in multiples of the largest tensor.
"""

import argparse
import json
import time
import weakref
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch_gpu import MIX, gpt_shapes

from celo2.torch import Celo2, Celo2Base

LAYERS, WIDTH, VOCABULARY = 6, 360, 256


def lm_params(hidden: bool) -> list[tuple[str, torch.nn.Parameter]]:
    """A language model's parameters with gradients, or the matrices of its layers alone."""
    generator = torch.Generator().manual_seed(0)
    shapes = gpt_shapes(LAYERS, WIDTH, VOCABULARY)
    if hidden:
        shapes = {n: s for n, s in shapes.items() if n.startswith("h.") and len(s) == 2}
    params = []
    for name, shape in shapes.items():
        values, grad = (0.02 * torch.randn(shape, generator=generator) for _ in range(2))
        param = torch.nn.Parameter(values)
        param.grad = grad
        params.append((name, param))
    return params


class PeakMemory(TorchDispatchMode):
    """The most bytes that results of operations had alive at a time."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            pointer = storage.data_ptr()
            if pointer not in known and pointer not in self.known:
                self.known.add(pointer)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.free, pointer, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def free(self, pointer: int, size: int) -> None:
        self.known.discard(pointer)
        self.live -= size


def tensors(tree) -> list[torch.Tensor]:
    return [x for x in tree_iter(tree) if isinstance(x, torch.Tensor)]


class Float32Muon(torch.optim.Muon):
    """Muon with products in float32: what it makes bfloat16 stays as it is."""

    def step(self, closure=None):
        with mock.patch.object(torch.Tensor, "bfloat16", lambda x: x.clone()):
            return super().step(closure)


class Contender:
    """An optimizer, and what is known of it."""

    def __init__(self, name: str, make, hidden: bool):
        self.name = name
        params = lm_params(hidden)
        self.count = sum(p.numel() for _, p in params)
        self.largest = max(p.numel() * p.element_size() for _, p in params)
        self.optimizer = make(params)
        self.cpu, self.wall = [], []
        self.first_seconds = self.run()[1]
        self.cpu.clear(), self.wall.clear()
        self.extra = float("nan")  # what a compiled program allocates cannot be seen
        if "compiled" not in name:
            with PeakMemory() as memory:
                self.optimizer.step()
            self.extra = memory.peak / self.largest

    def run(self) -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        self.optimizer.step()
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        return self.cpu[-1], self.wall[-1]

    def row(self) -> dict:
        middle = len(self.cpu) // 2
        state = sum(
            x.numel() * x.element_size()
            for s in self.optimizer.state.values()
            for x in s.values()
            if isinstance(x, torch.Tensor)
        )
        return {
            "optimizer": self.name,
            "cpu_ms": 1e3 * sorted(self.cpu)[middle],
            "wall_ms": 1e3 * sorted(self.wall)[middle],
            "ns_per_parameter": 1e9 * sorted(self.cpu)[middle] / self.count,
            "extra_over_largest": self.extra,
            "state_bytes_per_parameter": state / self.count,
            "first_step_seconds": self.first_seconds,
        }


def contenders(eager_only: bool) -> list[Contender]:
    bf16 = {"newton_schulz_dtype": torch.bfloat16}
    rows = [
        ("adamw", torch.optim.AdamW, False),
        ("celo2-base", Celo2Base, False),
        ("celo2-base compiled", lambda p: Celo2Base(p, compile=True), False),
        ("muon (hidden)", torch.optim.Muon, True),
        ("muon float32 (hidden)", Float32Muon, True),
        ("celo2", Celo2, False),
        ("celo2 (hidden)", Celo2, True),
        ("celo2 mix (hidden)", lambda p: Celo2(p, rule=MIX), True),
        ("celo2 bf16 (hidden)", lambda p: Celo2(p, **bf16), True),
        ("celo2 compiled (hidden)", lambda p: Celo2(p, compile=True), True),
        ("celo2 bf16 compiled (hidden)", lambda p: Celo2(p, compile=True, **bf16), True),
    ]
    return [Contender(*row) for row in rows if not (eager_only and "compiled" in row[0])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="leave compiled ones out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    all_ = contenders(args.eager)
    for _ in range(args.rounds):
        for contender in all_:
            contender.run()
    rows = {c.name: c.row() for c in all_}
    ratios = {
        f"{name} / {base}": rows[name]["cpu_ms"] / rows[base]["cpu_ms"]
        for name in rows
        for base in ("adamw", "muon (hidden)", "muon float32 (hidden)")
        if name.startswith("celo2") and ("hidden" in name) == ("hidden" in base)
    }
    if args.json:
        print(json.dumps({"rows": list(rows.values()), "ratios": ratios}, indent=1))
        return
    print(f"{'optimizer':29} {'CPU ms':>8} {'wall ms':>8} {'ns/param':>9} ", end="")
    print(f"{'extra/largest':>14} {'state B/p':>10} {'first s':>8}")
    for r in rows.values():
        print(
            f"{r['optimizer']:29} {r['cpu_ms']:8.1f} {r['wall_ms']:8.1f} "
            f"{r['ns_per_parameter']:9.2f} {r['extra_over_largest']:14.2f} "
            f"{r['state_bytes_per_parameter']:10.2f} {r['first_step_seconds']:8.1f}"
        )
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()
