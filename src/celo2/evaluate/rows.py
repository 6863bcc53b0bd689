"""The rows a run's records begin and end with."""

import time
from typing import Any

from celo2.evaluate.config import RunConfig
from celo2.evaluate.program import Program
from celo2.evaluate.setup import Setup
from celo2.runs import machine
from celo2.runs.fields import to_fields
from celo2.runs.records import Row


def start(config: RunConfig, setup: Setup) -> Row:
    """All that decides the run, and what it runs on."""
    return {
        "kind": "start",
        "step": 0,
        "config": to_fields(config),
        "rule": setup.rule,
        "data": setup.checksum,
        "metric": setup.spec.metric,
        "higher_is_better": setup.spec.higher_is_better,
        "sizes": setup.sizes,
        **_about(),
    }


def resume(step: int) -> Row:
    """Where a run goes on, and on what."""
    return {"kind": "resume", "step": step, **_about()}


def end(
    program: Program, step: int, seconds: float, metrics: dict[str, float | None] | None
) -> Row:
    """What came of the run; one without a finite score has diverged."""
    score = (metrics or {}).get(program.setup.spec.metric)
    return {
        "kind": "end",
        "step": step,
        "finished": True,
        "diverged": score is None,
        "metrics": metrics,
        "score": score,
        "seconds": round(seconds, 4),
        "seconds_per_step": seconds / max(1, step),
        "compile_seconds": round(program.compile_seconds, 3),
        "state_bytes": program.setup.sizes["state_bytes"],
        "temporary_bytes": program.temporary_bytes,
        "peak_bytes": machine.peak_bytes(),
    }


def shorten(numbers: Any) -> Any:
    """Six digits are enough for tables and pictures."""
    if isinstance(numbers, dict):
        return {name: shorten(value) for name, value in numbers.items()}
    return float(f"{numbers:.6g}")


def _about() -> Row:
    return {
        "time": time.time(),
        "versions": machine.versions(),
        "hardware": machine.hardware(),
    }
