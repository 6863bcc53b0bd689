"""Runs small enough for tests: all of one optimizer share one compiled program."""

from celo2.evaluate import RunConfig, run
from celo2.tasks import LMConfig, Task, language_model, load_text
from celo2.tasks.text import PYTHON_DOCS

RECIPE = """
command = "celo2 sweep this"
expect = "little"
final_seeds = [0, 1]
[run]
steps = 6
batch = 8
evaluation_batches = 2
[tasks.digits-mlp]
evaluate_every = 6
[optimizers.adamw]
learning_rates = { low = 1e-3, high = 1e-1, count = 3 }
[optimizers.plain]
optimizer = "sgd"
b1 = 0.0
learning_rates = [1e-2, 1e30]
weight_decays = [0.0]
[optimizers.plain.tasks.digits-mlp]
clip = 1e30
"""
TIMES = ("seconds", "seconds_per_step", "compile_seconds", "peak_bytes", "time")


def small(optimizer="adamw", **changes) -> RunConfig:
    fields = {
        "learning_rate": 1e-2,
        "steps": 12,
        "batch": 16,
        "record_every": 3,
        "evaluate_every": 4,
        "evaluation_batches": 2,
    }
    return RunConfig("digits-mlp", optimizer, **(fields | changes))


def train(out, config=None, **options) -> list[dict]:
    return list(run(config or small(), out, **options))


def of_kind(rows, *kinds) -> list[dict]:
    return [row for row in rows if row["kind"] in kinds]


def without_times(rows) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def stop_after(calls):
    """Says stop when asked for that many times."""
    asked = iter(range(calls))
    return lambda: next(asked, None) is None


def one_block(*, batch: int = 8, data: str | None = None) -> Task:
    """A language model of a single narrow block."""
    return language_model(load_text(PYTHON_DOCS, data), LMConfig(32, 1, 16, 16), batch)
