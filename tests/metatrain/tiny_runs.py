"""Runs small enough for tests: all share one compiled program."""

import dataclasses

import jax
import numpy as np
import pytest

from celo2.metatrain import MetaConfig, loop, metatrain, status
from celo2.metatrain.outer import build
from celo2.rule import RuleConfig
from celo2.runs.checkpoint import read_newest

TINY = MetaConfig(
    rule=RuleConfig(hidden=(4,), momentum_decays=(0.9,), factored_decays=(0.9,)),
    iterations=12,
    datasets=("digits",),
    problems=4,
    batch=8,
    truncation=5,
    unroll=(5, 20),
    augmentation="none",
)
FLAGS = (
    "--rule.hidden 4 --rule.momentum-decays 0.9 --rule.factored-decays 0.9 --datasets digits "
    "--problems 4 --batch 8 --truncation 5 --unroll 5 20 --augmentation none --try-every 0"
).split()


_programs = {}


def shared_build(config, families, mesh):
    """`outer.build`, with what it made before."""
    # Under a constant rate `iterations` is no part of the program.
    if config.decay == "constant":
        config = dataclasses.replace(config, iterations=1)
    data = [np.asarray(x) for family in families for x in jax.tree.leaves(family.data)]
    contents = tuple((x.shape, hash(x.tobytes())) for x in data)
    key = config, tuple(family.names for family in families), contents, mesh
    if key not in _programs:
        _programs[key] = build(config, families, mesh)
    return _programs[key]


@pytest.fixture
def shared_programs(monkeypatch):
    """Compiles equal configs once for all tests of the process."""
    monkeypatch.setattr(loop, "build", shared_build)


def tiny(**changes) -> MetaConfig:
    return dataclasses.replace(TINY, **changes)


def run(out, config=TINY, **options) -> list[dict]:
    return list(metatrain(config, out, **options))


def stop_after(calls: int):
    """Says stop when asked for that many times."""
    asked = iter(range(calls))
    return lambda: next(asked, None) is None


def digest(out) -> str:
    return status(out)["digest"]


def newest(out):
    """The newest whole checkpoint of a run."""
    return read_newest(out / "checkpoints")[0]


def of_kind(rows, kind) -> list[dict]:
    return [row for row in rows if row["kind"] == kind]
