"""How fast meta-training is: inner steps per second, by rule, devices and number of problems.

    python benchmarks/meta_train.py [--iterations 10]

Each row is a process of its own, since the number of CPU devices is fixed when JAX starts. The
problems are the embedded digits; which images they see does not change the speed. The best chunk of
three counts, and 100,000 iterations of 3,200 inner steps are the paper's run.
"""

import argparse
import json
import os
import subprocess
import sys
import time

PAPER = 100_000 * 3_200  # inner steps


def measure(preset: str, problems: int, iterations: int) -> float:
    """Inner steps per second, the best of three times that many iterations."""
    import dataclasses

    import jax

    from celo2.metatrain.config import PRESETS
    from celo2.metatrain.families import load_families
    from celo2.metatrain.outer import build
    from celo2.runs.processes import make_mesh

    config = dataclasses.replace(PRESETS[preset], datasets=("digits",), problems=problems)
    families, _ = load_families(config)
    program = build(config, families, make_mesh())
    state, _ = program.run(program.init(None), 1)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        state, metrics = program.run(state, iterations)
        jax.block_until_ready(state)
        best = max(best, float(metrics.inner_steps.sum()) / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--row", help="for the child processes: preset,problems as JSON")
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(*json.loads(args.row), args.iterations)))
        return
    print(
        f"{'rule':12} {'devices':>8} {'problems':>9} {'inner steps/s':>14} {'paper’s run, h':>15}"
    )
    cores = os.cpu_count() or 1
    rows = [("celo2", d, n) for d in (1, cores) for n in (8, 32, 128)] + [("celo2-base", cores, 32)]
    for preset, devices, problems in rows:
        flags = f"--xla_force_host_platform_device_count={devices}"
        command = [sys.executable, __file__, "--iterations", str(args.iterations)]
        child = subprocess.run(
            [*command, "--row", json.dumps([preset, problems])],
            env={**os.environ, "XLA_FLAGS": flags},
            capture_output=True,
            text=True,
        )
        if child.returncode:
            sys.exit(child.stderr)
        rate = json.loads(child.stdout.splitlines()[-1])
        print(
            f"{preset:12} {devices:8} {problems:9} {rate:14,.0f} {PAPER / rate / 3600:15.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
