"""What half-precision momenta and Newton–Schulz cost in quality, on the demo's transformer.

    python benchmarks/precision.py [--steps 300]

Each setting trains with the same seeds at the same learning rates; the table gives the final
validation losses.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import jax.numpy as jnp

from celo2.jax import celo2
from celo2.tasks import TASKS

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from demo import train  # noqa: E402  (a script beside, not a package)

RATES = [2e-3, 4e-3]
SETTINGS = {
    "float32": {},
    "momentum bfloat16": {"momentum_dtype": jnp.bfloat16},
    "Newton–Schulz bfloat16": {"newton_schulz_dtype": jnp.bfloat16},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    task = TASKS["text-tiny"].make()
    print(f"{'setting':24}" + "".join(f"  rate {rate:<8g}" for rate in RATES))
    for name, options in SETTINGS.items():
        rows = train(task, partial(celo2, **options), RATES, args.steps)
        print(f"{name:24}" + "".join(f"  {row['valid_loss']:<13.4f}" for row in rows), flush=True)


if __name__ == "__main__":
    main()
