"""Sweeps written by hand, with answers known beforehand."""

import json

from celo2.evaluate.config import RunConfig, resolve
from celo2.runs import records
from celo2.runs.fields import to_fields

STEPS = 100


def config_of(optimizer, rate, seed=0, label=None) -> RunConfig:
    return resolve(
        RunConfig("digits-mlp", optimizer, label, learning_rate=rate, seed=seed, steps=STEPS)
    )


def rows_of(config, losses, diverged=False) -> list[dict]:
    """A run with these validation losses, at equal distances from step 0 to the last."""
    steps = [round(i * STEPS / (len(losses) - 1)) for i in range(len(losses))]
    start = {"kind": "start", "step": 0, "config": to_fields(config), "rule": None, "time": 0.0}
    start |= {"metric": "loss", "higher_is_better": False, "sizes": {"parameters": 1234}}
    start |= {"versions": {"celo2": "9.8"}, "hardware": {"device": "abacus"}}
    valid = [
        {"kind": "valid", "step": s, "metrics": {"loss": x}}
        for s, x in zip(steps, losses, strict=True)
    ]
    norms = {
        "update_rms": {"hidden": 0.01, "other": None},
        "param_rms": {"hidden": 0.2, "other": 0.3},
    }
    train = [
        {"kind": "train", "step": s, "metrics": {"loss": x}, **norms}
        for s, x in zip(steps, losses, strict=True)
    ]
    score = None if diverged else losses[-1]
    end = {"kind": "end", "step": STEPS, "finished": True, "diverged": diverged, "score": score}
    end |= {
        "metrics": None if diverged else {"loss": score},
        "seconds": 1.0,
        "seconds_per_step": 0.02,
    }
    end |= {"compile_seconds": 3.0, "state_bytes": 1_500_000, "temporary_bytes": None}
    return [start, *valid, *train, end]


def write_sweep(folder, tuning, final=()) -> None:
    """A sweep's folder of (config, rows) pairs."""
    index: dict = {"recipe": "<hand>", "command": "celo2 sweep <b>&", "tuning": {}, "final": {}}
    for stage, runs in (("tuning", tuning), ("final", final)):
        for config, rows in runs:
            name = f"{config.label}-{config.learning_rate:g}-{config.seed}".replace("/", "-")
            if config.task != "digits-mlp":
                name = f"{config.task}-{name}"
            index[stage][name] = to_fields(config)
            (folder / name).mkdir(exist_ok=True, parents=True)
            (folder / name / "records.jsonl").unlink(missing_ok=True)
            for row in rows:
                records.append(folder / name / "records.jsonl", row)
    (folder / "sweep.json").write_text(json.dumps(index))


def example_sweep(folder):
    """AdamW's best is 1.0, at the middle of three rates; muon's 0.5, at the lower of two, with two
    seeds; lion diverges; sgd, under a name that is HTML, does not reach AdamW."""
    tuning = [
        *(
            (config_of("adamw", r), [3.0, 2.0, x])
            for r, x in ((1e-3, 1.5), (1e-2, 1.0), (1e-1, 2.5))
        ),
        (config_of("muon", 1e-2), [3.0, 2.0, 0.4]),
        (config_of("muon", 1e-1), [3.0, 2.0, 1.0]),
        (config_of("lion", 1e-2), [3.0, None, None]),
        (config_of("sgd", 1e-2, label="<i>$\\bad"), [3.0, 2.5, 2.0]),
    ]
    final = [(config_of("muon", 1e-2, s), [3.0, 2.0, x]) for s, x in ((0, 0.4), (1, 0.6))]
    write_sweep(
        folder,
        [(c, rows_of(c, x, diverged=x[-1] is None)) for c, x in tuning],
        [(c, rows_of(c, x)) for c, x in final],
    )
    return folder
