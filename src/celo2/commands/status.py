"""`celo2 status`: how far a run is, without touching it."""

import json as jsonlib
import os
from typing import Any


def status(run: str, json: bool = False) -> None:
    """Show how far a meta-training run is, how it does, and a digest of its newest checkpoint.

    Reads only. Equal digests mean equal runs: same state, same config, same data.

    Args:
        run: the run's folder.
        json: print one JSON object instead of a table.
    """
    # The run may be using this machine's accelerator; reading needs none.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from celo2.metatrain import status as read_status

    facts = read_status(run)
    print(jsonlib.dumps(facts, indent=2) if json else as_table(facts))


def as_table(facts: dict[str, Any]) -> str:
    """The facts in lines, for people."""
    process = facts["process"] or {}
    where = f", process {process.get('pid')} on {process.get('host')}" if process else ""
    rate = facts["inner_steps_per_second"]
    losses = ", ".join(f"{name} {loss}" for name, loss in facts["family_loss"].items())
    lines = {
        "run": facts["run"],
        "state": facts["state"] + where,
        "iteration": f"{facts['iteration']} of {facts['iterations']}",
        "meta-loss": f"{facts['loss']} ({losses})" if losses else "none yet",
        "time": f"{facts['elapsed'] / 3600:.2f} h, about {as_hours(facts['seconds_left'])} left",
        "rate": f"{rate:,.0f} inner steps/s" if rate else "none yet",
        "checkpoints": ", ".join(map(str, facts["checkpoints"])) or "none yet",
        "best": best_line(facts["best"]),
        "digest": facts["digest"] or "none yet",
    }
    for damaged, cause in facts["damaged"].items():
        lines[f"damaged {damaged}"] = cause
    for row in facts["warnings"][-5:]:
        lines[f"warning {row['iteration']}"] = row["cause"]
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def as_hours(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds / 3600:.2f} h"


def best_line(best: dict[str, Any] | None) -> str:
    if best is None:
        return "none yet"
    return f"held-out score {best['score']:.4f} at iteration {best['iteration']}"
