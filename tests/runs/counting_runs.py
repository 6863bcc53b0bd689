"""Runs of a job that only counts, which is all the engine needs to know."""

import jax
import jax.numpy as jnp
import numpy as np

from celo2.runs import checkpoint
from celo2.runs.engine import Advanced, Job, run_job
from celo2.runs.folder import RunFolder

NOISE = np.random.default_rng(0).normal(size=2000).astype(np.float32)  # does not compress


def counting(total=10, periods=(3,), bad_from=None, fatal_at=None, config=None, **options) -> Job:
    """Adds 1 to an array at each count; unsound from `bad_from` on, given up at `fatal_at`."""
    memory = {"calls": 0}

    def advance(state, done, until):
        memory["calls"] += 1
        row = {"kind": "train", "step": until, "value": float(state["x"]) + until - done}
        return Advanced(
            state | {"x": state["x"] + (until - done)},
            until,
            [row],
            sound=bad_from is None or until < bad_from,
            fatal="it is hopeless" if fatal_at is not None and until >= fatal_at else None,
        )

    identity = {"config": config or {"a": 1}, "data": {}, "version": "1"}
    state = {"x": jnp.zeros(()), "key": jax.random.key(0), "noise": NOISE}
    return Job(
        **{
            "count": "step",
            "total": total,
            "identity": identity,
            "differences": lambda stored: [
                f"{k} differs" for k in identity["config"] if identity["config"] != stored["config"]
            ],
            "abstract": jax.eval_shape(lambda: state),
            "begin": lambda: dict(state),
            "advance": advance,
            "periods": periods,
            "first_rows": lambda state, done: [{"kind": "start", "step": done}],
            "last_row": lambda state, done, reason: {"kind": "end", "step": done, "why": reason},
            "memory": lambda: dict(memory),
            "recall": lambda meta: memory.update(calls=meta["calls"]),
            "save_first": True,
            **options,
        }
    )


def go(path, job=None, **options):
    return list(run_job(RunFolder(path), lambda: job or counting(), **options))


def of_kind(rows, kind):
    return [row for row in rows if row["kind"] == kind]


def newest(path):
    return checkpoint.read_newest(path / "checkpoints")[0]


def stop_after(calls):
    asked = iter(range(calls))
    return lambda: next(asked, None) is None


def array_files(out, iteration):
    """The files of a checkpoint that hold numbers, largest last."""
    files = (p for p in (out / "checkpoints" / str(iteration) / "state").rglob("d/*"))
    return sorted(files, key=lambda p: p.stat().st_size)


def flip_bit(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
