"""Trains a small language model with AdamW, Muon and Celo2, each at four learning rates.

    python examples/demo.py [--out demo] [--steps 300]

A byte-level transformer (0.1M parameters) on the text of Python's own documentation: no download.
Muon and Celo2 update the same hidden matrices, with step sizes of the same range; the rest is
updated by the same AdamW (Nesterov's momentum, the same multiple of the step size). Writes
OUT/demo.jsonl (every run) and OUT/demo.png, and prints the best of each. Three minutes on two
cores. `--redraw FILE.jsonl` only draws.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.figure
import numpy as np
import optax

from celo2.baselines import RMS, adamw, muon
from celo2.jax import celo2
from celo2.rule import ADAM_MULTIPLIER
from celo2.tasks import TASKS, supervised

matplotlib.use("Agg")


def muon_beside_the_same_adam(schedule: optax.Schedule) -> optax.GradientTransformation:
    """Muon's matrices step by RMS × rate, Celo2's by the rate; AdamW by as much beside both."""
    return muon(schedule, adam_learning_rate=lambda t: ADAM_MULTIPLIER * RMS * schedule(t))


OPTIMIZERS = {
    "AdamW": (adamw, [2e-3, 4e-3, 8e-3, 1.6e-2]),
    "Muon": (muon_beside_the_same_adam, [1e-2, 2e-2, 4e-2, 8e-2]),
    "Celo2": (celo2, [2e-3, 4e-3, 8e-3, 1.6e-2]),
}


def train(task, optimizer, rates: list[float], steps: int) -> list[dict]:
    """One row for each rate: training losses and the final validation loss."""

    @jax.jit
    def run(data, rate):
        warmup = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 20, steps)
        trainer = supervised(task._replace(data=data), optimizer(lambda t: rate * warmup(t)))
        keys = jax.random.split(jax.random.key(1), steps)
        state = trainer.init(jax.random.key(0))
        state, metrics = jax.lax.scan(trainer.step, state, keys)
        return metrics["loss"], trainer.evaluate(state, jax.random.key(2))["loss"]

    rows = []
    for rate in rates:
        losses, final = jax.device_get(run(task.data, jnp.float32(rate)))
        rows.append({"rate": rate, "valid_loss": float(final), "losses": losses.tolist()})
    return rows


def draw(rows: list[dict], path: Path) -> None:
    """The best run of each optimizer, and how it depends on the rate."""
    figure = matplotlib.figure.Figure(figsize=(9, 3.4), layout="constrained")
    curves, rates = figure.subplots(1, 2)
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        mine = [row for row in rows if row["optimizer"] == name]
        best = min(mine, key=lambda row: row["valid_loss"])
        smooth = np.convolve(best["losses"], np.ones(10) / 10, "valid")
        curves.plot(smooth, label=f"{name} (rate {best['rate']:g})")
        rates.plot([r["rate"] for r in mine], [r["valid_loss"] for r in mine], "o-", label=name)
    curves.set(xlabel="step", ylabel="training loss", title="each at its best rate")
    rates.set(xscale="log", xlabel="learning rate", title="validation loss at the end")
    rates.minorticks_off()
    ticks = [0.002, 0.005, 0.01, 0.02, 0.05]
    rates.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    curves.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--redraw", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.redraw:
        rows = [json.loads(line) for line in args.redraw.read_text().splitlines()]
    else:
        task, rows = TASKS["text-tiny"].make(), []
        for name, (optimizer, choices) in OPTIMIZERS.items():
            rows += [{"optimizer": name, **r} for r in train(task, optimizer, choices, args.steps)]
            best = min((r for r in rows if r["optimizer"] == name), key=lambda r: r["valid_loss"])
            print(f"{name:8} validation loss {best['valid_loss']:.3f} at rate {best['rate']:g}")
        (args.out / "demo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw(rows, args.out / "demo.png")
    print(f"Figure: {args.out / 'demo.png'}")


if __name__ == "__main__":
    main()
