"""The JAX examples and the demo run; those of Torch are in tests/torch/test_trainer.py."""

import json
import re
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from conftest import REPOSITORY

EXAMPLES = REPOSITORY / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example as a program and gives what it prints."""

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with jax.numpy_rank_promotion("allow"):  # as users have it
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def number_after(words: str, text: str) -> float:
    return float(text.rsplit(words, 1)[1].split()[0])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_is_short_and_says_how_it_is_run(path):
    text = path.read_text("utf-8")
    assert len(text.splitlines()) < (110 if path.name == "demo.py" else 80)
    assert f"    python examples/{path.name}" in text


def test_linen_example_learns(run):
    printed = run("jax_linen.py", "--epochs", 2)
    assert "celo2 updates 78.0%" in printed
    assert number_after("accuracy ", printed) > 0.8
    assert number_after("not finite: ", printed) == 0


def test_equinox_example_learns(run):
    printed = run("jax_equinox.py", "--steps", 200)
    assert printed.count("override 'weight$'") == 2
    assert number_after("AdamW: validation loss ", printed) < 0.6
    assert number_after("Celo2: validation loss ", printed) < 0.6


def test_nnx_example_runs(run):
    printed = run("jax_nnx.py", "--steps", 3)
    assert "64×2×32" in printed and "head/kernel" in printed
    assert number_after("AdamW: loss ", printed) < 7
    assert number_after("Celo2: loss ", printed) < 7


@pytest.mark.slow
def test_celo2_learns_faster_than_adamw_in_the_nnx_example(run):
    printed = run("jax_nnx.py", "--steps", 100)
    celo2, adamw = (number_after(f"{name}: loss ", printed) for name in ("Celo2", "AdamW"))
    assert celo2 < adamw < 3.5


def test_demo_has_the_same_adam_beside_muon_and_celo2():
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    params = {"embed": {"table": jnp.ones((6, 4))}, "norm": {"scale": jnp.ones(4)}}
    grads = [jax.tree.map(lambda x, k=k: jnp.cos(x * k), params) for k in (1.0, 2.0, 3.0)]

    def train(name: str, rate: float):
        tx = demo["OPTIMIZERS"][name][0](optax.constant_schedule(rate))
        state, now = tx.init(params), params
        for grad in grads:
            updates, state = tx.update(grad, state, now)
            now = optax.apply_updates(now, updates)
        return now

    # The RMS of a matrix's update is the rate under Celo2, a fifth of it under Muon.
    celo2, muon = train("Celo2", 1e-3), train("Muon", 5e-3)
    for a, b in zip(jax.tree.leaves(celo2), jax.tree.leaves(muon), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert np.all(np.abs(a - 1.0) > 1e-3)


def test_demo_tries_the_same_steps_with_muon_and_celo2():
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    rates = {name: np.array(rates) for name, (_, rates) in demo["OPTIMIZERS"].items()}
    np.testing.assert_allclose(rates["Muon"] / rates["Celo2"], 5.0)
    assert {len(found) for found in rates.values()} == {4}


def test_figure_of_the_demo_is_drawn_from_its_records(run, tmp_path):
    records = REPOSITORY / "docs" / "figures" / "demo.jsonl"
    run("demo.py", "--redraw", records, "--out", tmp_path)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in records.read_text("utf-8").splitlines()]
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    tried = {name: sorted(rates) for name, (_, rates) in demo["OPTIMIZERS"].items()}
    kept = {name: sorted(r["rate"] for r in rows if r["optimizer"] == name) for name in tried}
    assert kept == tried


@pytest.mark.slow
def test_demo_prints_the_best_of_each_optimizer(run, tmp_path):
    printed = run("demo.py", "--steps", 20, "--out", tmp_path)
    assert re.findall(r"^(\w+) +validation loss", printed, re.MULTILINE) == [
        "AdamW",
        "Muon",
        "Celo2",
    ]
    assert len((tmp_path / "demo.jsonl").read_text("utf-8").splitlines()) == 12
