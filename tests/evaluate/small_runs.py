"""Runs small enough for tests: all of one optimizer share one compiled program."""

from celo2.evaluate import RunConfig, run

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
