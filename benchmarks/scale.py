"""Compiles training steps at the paper's scale for a mesh of virtual devices, and measures them.

    python benchmarks/scale.py --sizes gpt2 --mesh data=32 --out docs/results/scale.jsonl
    python benchmarks/scale.py --table docs/results/scale.jsonl

No weights are allocated. For each size and optimizer: bytes on each device (arguments and
temporaries) of the whole training step and of the optimizer alone, and the collectives of the
optimizer, as a JSON line. The second form makes a table of the lines. Temporaries are those of
XLA's CPU backend, which schedules for other things than memory: an upper bound for accelerators.
"""

import json
import math
import time
from collections import Counter
from pathlib import Path

import jax
import tyro
from compiled import collectives, memory

from celo2.evaluate.config import RunConfig, resolve
from celo2.evaluate.optimizers import load_rule, make_optimizer, with_norms
from celo2.evaluate.program import Setup, lower_advance, set_up
from celo2.evaluate.sharding import in_mesh
from celo2.runs.processes import make_mesh, parse_mesh

OPTIMIZERS = ("adamw", "muon", "celo2-base", "celo2")
FAST = {"xla_backend_optimization_level": 0}  # of machine code alone: the same program


def main(
    sizes: tuple[str, ...] = ("gpt2", "gpt3xl"),
    optimizers: tuple[str, ...] = OPTIMIZERS,
    mesh: str = "data=32",
    batch: int = 32,
    precision: str = "bfloat16",
    whole_step: bool = True,
    out: Path | None = None,
    table: Path | None = None,
) -> None:
    """Compile, measure, print.

    Args:
        sizes: tasks of celo2.tasks.
        optimizers: whose steps to compile.
        mesh: the devices.
        batch: examples in a step, over all devices.
        precision: of the model's arithmetic.
        whole_step: compile the forward and backward passes too.
        out: a file to append the JSON lines to.
        table: only print the table of such a file.
    """
    if table is not None:
        print(as_table([json.loads(line) for line in table.read_text().splitlines()]))
        return
    shape = parse_mesh(mesh)
    jax.config.update("jax_num_cpu_devices", math.prod(shape.values()))
    for size in sizes:
        for optimizer in optimizers:
            config = resolve(
                RunConfig(size, optimizer, batch=batch, precision=precision, remat=True)
            )
            row = {"size": size, "optimizer": optimizer, "mesh": mesh, "batch": batch}
            row |= measure(set_up(config, None, make_mesh(shape), blank=True), whole_step)
            print(json.dumps(row), flush=True)
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def as_table(rows: list[dict]) -> str:
    """The rows in Markdown; memory in bytes for each parameter that a device holds, and in GB."""
    lines = [
        "| model, mesh | optimizer | parameters and state, B/p | temporaries of the update, B/p "
        "| sent in the update, MB | collectives | of the largest array | whole step, GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        devices = math.prod(parse_mesh(row["mesh"]).values())
        mine = row["parameters"] / devices
        held = (row["step"]["arguments"] if "step" in row else math.nan) / mine
        sent = row["collectives"].values()
        kinds = ", ".join(f"{v['runs']} {k}" for k, v in row["collectives"].items())
        largest = max(v["largest"] for v in sent) / row["largest_tensor"]
        cells = [f"{row['size']}, {row['mesh']}", row["optimizer"], f"{held:.1f}"]
        cells += [f"{row['update']['temporaries'] / mine:.1f}"]
        cells += [f"{sum(v['bytes'] for v in sent) / 1e6:.1f}", kinds, f"{largest:.2%}"]
        cells += [f"{row['step']['total'] / 1e9:.1f}" if "step" in row else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(setup: Setup, whole_step: bool) -> dict:
    """Parameters, and what the optimizer and the whole step take on one device."""
    start = time.monotonic()
    alone = compile_optimizer(setup)
    found = {
        "parameters": setup.sizes["parameters"],
        "largest_tensor": max(math.prod(x.shape) for x in jax.tree.leaves(setup.abstract.params)),
        "update": memory(alone),
        "collectives": summarize(alone.as_text()),
        "compile_seconds": round(time.monotonic() - start, 1),
    }
    if whole_step:
        start = time.monotonic()
        found["step"] = memory(lower_advance(setup)[1].compile(FAST))
        found["step_compile_seconds"] = round(time.monotonic() - start, 1)
    return found


def compile_optimizer(setup: Setup):
    """The optimizer's update of sharded parameters, from gradients that lie as they do."""
    config = setup.config
    tx = with_norms(make_optimizer(config, load_rule(config.optimizer), lambda count: 1e-3))
    params, state = setup.abstract
    places = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(tx.update, donate_argnums=(0, 1), out_shardings=places)
    with in_mesh(setup.mesh):
        return step.lower(params, state, params).compile(FAST)


def summarize(hlo: str) -> dict[str, dict[str, int]]:
    """For each kind of collective: how many run, their bytes, and elements of the largest."""
    runs, total, largest = Counter(), Counter(), Counter()
    for sent in collectives(hlo):
        runs[sent.name] += sent.times
        total[sent.name] += sent.times * sent.bytes
        largest[sent.name] = max(largest[sent.name], sent.elements)
    return {
        name: {"runs": runs[name], "bytes": total[name], "largest": largest[name]} for name in runs
    }


if __name__ == "__main__":
    tyro.cli(main)
