"""What an optimizer costs within a whole training step, and how its own step grows with the model.

    python benchmarks/train_step.py [--task lm-1m] [--rounds 5] [--tokens 8192]
    python benchmarks/train_step.py --growth

The first trains a language model at a realistic batch with each optimizer in turn, in one process,
and prints the time of a step as a multiple of AdamW's. The second runs the optimizer steps alone on
language models from 0.1M to 50M parameters.
"""

import argparse
import time

import jax
import numpy as np
import optax
from step_time import Contender, lm_params

import celo2.jax
from celo2.tasks import TASKS, supervised

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
    "celo2-base": lambda: celo2.jax.celo2_base(3e-4),
    "celo2": lambda: celo2.jax.celo2(3e-4),
}
# Width, layers and vocabulary of models from 0.1M to 50M parameters.
SIZES = [(64, 2, 256), (128, 5, 512), (256, 6, 4096), (384, 6, 8192), (512, 12, 24576)]


def train_steps(size: str, rounds: int, tokens: int) -> None:
    spec = TASKS[size]
    length = spec.make(batch=1).sample(spec.make(batch=1).data, jax.random.key(0), "train")
    per_sequence = jax.tree.leaves(length)[0].shape[-1]
    task = spec.make(batch=max(1, tokens // per_sequence))
    runs = {}
    for name, make in OPTIMIZERS.items():
        trainer = supervised(task, make())
        runs[name] = [trainer, trainer.init(jax.random.key(0)), [], []]
    for i in range(rounds + 1):
        for run in runs.values():
            cpu, wall = time.process_time(), time.perf_counter()
            run[1], metrics = run[0].step(run[1], jax.random.key(i))
            jax.block_until_ready((run[1], metrics))
            run[2].append(time.process_time() - cpu)
            run[3].append(time.perf_counter() - wall)
    base = np.median(runs["adamw"][2][1:])
    print(f"{'optimizer':12} {'CPU ms':>8} {'wall ms':>8} {'× AdamW (CPU)':>14}")
    for name, (_, _, cpu, wall) in runs.items():
        cpu, wall = np.median(cpu[1:]), np.median(wall[1:])
        print(f"{name:12} {1e3 * cpu:8.0f} {1e3 * wall:8.0f} {cpu / base:14.2f}")


def growth(rounds: int) -> None:
    print(
        f"{'parameters':>12} " + " ".join(f"{name:>12}" for name in OPTIMIZERS) + "  (CPU ns/param)"
    )
    for width, layers, vocabulary in SIZES:
        shapes = lm_params(width, layers, vocabulary)
        cells = []
        for name, make in OPTIMIZERS.items():
            contender = Contender(name, make(), shapes)
            for _ in range(rounds + 1):
                contender.run()
            cells.append(1e9 * np.median(contender.cpu[1:]) / contender.count)
        print(f"{contender.count:12,} " + " ".join(f"{cell:12.1f}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    models = [name for name in TASKS if name.startswith("lm-")]
    parser.add_argument("--task", default="lm-1m", choices=models)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192, help="per step")
    parser.add_argument("--growth", action="store_true")
    args = parser.parse_args()
    growth(args.rounds) if args.growth else train_steps(args.task, args.rounds, args.tokens)


if __name__ == "__main__":
    main()
