"""What an optimizer step costs: Celo2 and Celo2-base against AdamW, Muon, VeLO and Celo.

    python benchmarks/step_time.py [--rounds 7] [--json]

All optimizers update the same language model's parameters (13.8M: an embedding of 8192×384 and
six layers of four 384×384, 384×1536, 1536×384 and two norms) from the same gradients, in turn in
one process, so that other load hits them alike. CPU seconds are of all threads; temporaries and
compile time are XLA's own. Muon and Celo2 get the hidden matrices only, as they would in use;
the others get everything. VeLO and Celo have random weights of the official sizes: a step costs the
same with any.
"""

import argparse
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import celo2.jax
from celo2.velo import CELO, VELO, VeloConfig, VeloRule, initial_velo_weights

LAYERS, WIDTH, VOCABULARY = 6, 384, 8192


def lm_params(width: int = WIDTH, layers: int = LAYERS, vocabulary: int = VOCABULARY) -> dict:
    """A language model's parameters, as shapes."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    block = {
        **{name: array(width, width) for name in ("query", "key", "value", "out")},
        "up": array(width, 4 * width),
        "down": array(4 * width, width),
        "norm_1": array(width),
        "norm_2": array(width),
    }
    blocks = {f"block_{i}": dict(block) for i in range(layers)}
    return {"embed": array(vocabulary, width), **blocks, "norm": array(width)}


def draw(shapes, seed: int):
    leaves, treedef = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)
    return treedef.unflatten(
        [jnp.asarray(rng.normal(0, 0.02, x.shape), jnp.float32) for x in leaves]
    )


def size(tree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


class Contender:
    """A compiled optimizer step and what is known of it before it runs."""

    def __init__(self, name: str, tx: optax.GradientTransformation, shapes):
        self.name, self.count = name, size(shapes)
        self.params, self.grads = draw(shapes, 0), draw(shapes, 1)
        self.state = tx.init(self.params)
        jax.clear_caches()
        start = time.perf_counter()
        # The loss, for those that read it.
        update = functools.partial(optax.with_extra_args_support(tx).update, value=1.0)
        lowered = jax.jit(update, donate_argnums=1).lower(self.grads, self.state, self.params)
        self.trace_seconds = time.perf_counter() - start
        start = time.perf_counter()
        self.compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - start
        self.temporaries = self.compiled.memory_analysis().temp_size_in_bytes / self.count
        self.state_bytes = sum(x.nbytes for x in jax.tree.leaves(self.state)) / self.count
        self.cpu, self.wall = [], []

    def run(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        updates, self.state = self.compiled(self.grads, self.state, self.params)
        jax.block_until_ready((updates, self.state))
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)

    def row(self) -> dict:
        return {
            "optimizer": self.name,
            "parameters": self.count,
            "cpu_ms": 1e3 * float(np.median(self.cpu)),
            "wall_ms": 1e3 * float(np.median(self.wall)),
            "ns_per_parameter": 1e9 * float(np.median(self.cpu)) / self.count,
            "temporary_bytes_per_parameter": self.temporaries,
            "state_bytes_per_parameter": self.state_bytes,
            "trace_seconds": self.trace_seconds,
            "compile_seconds": self.compile_seconds,
        }


def random_rule(config: VeloConfig) -> VeloRule:
    return VeloRule(config, initial_velo_weights(config, np.random.default_rng(0)))


def contenders(shapes) -> list[Contender]:
    hidden = {
        name: {k: v for k, v in block.items() if v.ndim == 2}
        for name, block in shapes.items()
        if name.startswith("block")
    }
    return [
        Contender("adamw", optax.adamw(1e-3), shapes),
        Contender("celo2-base", celo2.jax.celo2_base(1e-3), shapes),
        Contender("celo", celo2.jax.celo(1000, rule=random_rule(CELO)), shapes),
        Contender("velo", celo2.jax.velo(1000, rule=random_rule(VELO)), shapes),
        Contender("adamw (hidden)", optax.adamw(1e-3), hidden),
        Contender("muon (hidden)", optax.contrib.muon(1e-3), hidden),
        Contender("celo2 (hidden)", celo2.jax.celo2(1e-3), hidden),
    ]


def race(all_: list[Contender], rounds: int) -> list[dict]:
    """Rows of medians over `rounds` turns, after one that does not count."""
    for contender in all_:
        contender.run()
        contender.cpu.clear(), contender.wall.clear()
    for _ in range(rounds):
        for contender in all_:
            contender.run()
    return [contender.row() for contender in all_]


def ratio(rows: list[dict], name: str, base: str, field: str) -> float:
    by_name = {row["optimizer"]: row for row in rows}
    return by_name[name][field] / by_name[base][field]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = race(contenders(lm_params()), args.rounds)
    for row in rows:
        row["first_call_seconds"] = row["trace_seconds"] + row["compile_seconds"]
    summary = {
        "celo2-base / adamw, CPU": ratio(rows, "celo2-base", "adamw", "cpu_ms"),
        "celo / adamw, CPU": ratio(rows, "celo", "adamw", "cpu_ms"),
        "velo / adamw, CPU": ratio(rows, "velo", "adamw", "cpu_ms"),
        "celo2 / muon, CPU": ratio(rows, "celo2 (hidden)", "muon (hidden)", "cpu_ms"),
        "celo2-base / adamw, compile": ratio(rows, "celo2-base", "adamw", "compile_seconds"),
        "celo2-base / adamw, trace and compile": ratio(
            rows, "celo2-base", "adamw", "first_call_seconds"
        ),
        "celo2 / muon, trace and compile": ratio(
            rows, "celo2 (hidden)", "muon (hidden)", "first_call_seconds"
        ),
    }
    if args.json:
        print(json.dumps({"rows": rows, "ratios": summary}, indent=1))
        return
    print(f"{'optimizer':16} {'CPU ms':>8} {'wall ms':>8} {'ns/param':>9} ", end="")
    print(f"{'temp B/p':>9} {'state B/p':>10} {'trace s':>8} {'compile s':>10}")
    for r in rows:
        print(
            f"{r['optimizer']:16} {r['cpu_ms']:8.1f} {r['wall_ms']:8.1f} "
            f"{r['ns_per_parameter']:9.2f} {r['temporary_bytes_per_parameter']:9.2f} "
            f"{r['state_bytes_per_parameter']:10.2f} {r['trace_seconds']:8.2f} "
            f"{r['compile_seconds']:10.2f}"
        )
    for name, value in summary.items():
        print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()
