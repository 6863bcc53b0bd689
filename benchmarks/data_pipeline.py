"""How fast token windows are read, beside how fast a small language model trains on them.

    python benchmarks/data_pipeline.py [--tokens 50e6] [--batch 8] [--length 1024] [--seconds 3]

Makes a token folder of random bytes in the temporary folder, reads shuffled batches from it, and
trains lm-1m on the same folder, one after the other.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax

from celo2.tasks import TASKS, Part, supervised
from celo2.tasks.tokens import TokenFolder, make_tokens, read_token_folder, token_stream


def make_folder(path: Path, count: int) -> TokenFolder:
    letters = np.random.default_rng(0).integers(97, 123, count, dtype=np.uint8)
    letters[::80] = ord("\n")
    (path / "text.txt").write_bytes(letters.tobytes())
    make_tokens(path / "tokens", [path / "text.txt"], tokenizer="bytes")
    return read_token_folder(path / "tokens")


def speed(step: Callable[[], int], seconds: float) -> tuple[float, float]:
    """What `step` counts, per second of wall and of CPU time; the latter is of all threads."""
    step()
    wall, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - wall < seconds:
        count += step()
    return count / (time.perf_counter() - wall), count / (time.process_time() - cpu)


def reader(folder: TokenFolder, length: int, batch: int) -> Callable[[], int]:
    batches = token_stream(folder, length, batch).batches("train", 0, 0, Part())
    return lambda: next(batches)[:, 1:].size


def trainer(folder: TokenFolder) -> Callable[[], int]:
    task = TASKS["lm-1m"].make(text=folder.path)
    batches = task.data.batches("train", 0, 0, Part())
    tx, key = optax.adamw(1e-3), jax.random.key(0)
    update = jax.jit(
        lambda batch, state: supervised(task._replace(data=batch), tx).step(state, key)
    )
    state = supervised(task, tx).init(key)

    def step() -> int:
        nonlocal state
        batch = next(batches)
        state, _ = jax.block_until_ready(update(batch, state))
        return batch[:, 1:].size

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=float, default=50e6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        folder = make_folder(Path(path), int(args.tokens))
        rows = {
            "reading": reader(folder, args.length, args.batch),
            "training lm-1m": trainer(folder),
        }
        print(f"{'tokens per second of':20} {'wall time':>12} {'CPU time':>12}")
        for name, step in rows.items():
            wall, cpu = speed(step, args.seconds)
            print(f"{name:20} {wall:12,.0f} {cpu:12,.0f}")


if __name__ == "__main__":
    main()
