"""Runs that go wrong, and tasks of one's own."""

import pytest
from tiny_runs import TINY, newest, of_kind, run, shared_programs, tiny

import celo2
from celo2.metatrain import (
    Diverged,
    Limits,
    divergence,
    metatrain,
    status,
)

pytestmark = pytest.mark.usefixtures("shared_programs")
__all__ = ["shared_programs"]


def give_up(out, limits) -> list[dict]:
    rows = []
    with pytest.raises(Diverged) as caught:
        for row in metatrain(TINY, out, limits=limits, checkpoint_every=5):
            rows.append(row)
    assert rows[-1]["kind"] == "end" and rows[-1]["reason"] == "diverged"
    warning = of_kind(rows, "warning")[-1]
    assert f"iteration {warning['iteration']}: {warning['cause']}" in str(caught.value)
    return rows


def test_exploding_rule_is_given_up_and_the_last_good_one_kept(tmp_path):
    rows = give_up(tmp_path / "run", Limits(weight_norm=0.1))
    assert "weights have norm" in of_kind(rows, "warning")[0]["cause"]
    assert newest(tmp_path / "run").iteration == 0
    assert celo2.load(tmp_path / "run" / "rule.safetensors").origin["iterations"] == 0
    assert status(tmp_path / "run")["state"] == "diverged"


def test_checkpoints_wait_while_a_run_is_stuck(tmp_path, monkeypatch):
    monkeypatch.setattr(divergence, "AT_LIMIT", 0.0)
    rows = give_up(tmp_path / "run", Limits(patience=11))
    first, last = of_kind(rows, "warning")
    assert (first["iteration"], first["fatal"]) == (1, False)
    assert (last["iteration"], last["fatal"]) == (11, True)
    assert newest(tmp_path / "run").iteration == 0


def test_own_task_is_meta_trained(tmp_path, monkeypatch):
    (tmp_path / "my_tasks.py").write_text(
        "import jax.numpy as jnp\n"
        "from celo2.tasks import Task\n"
        "def make():\n"
        "    return Task(lambda key: {'kernel': jnp.ones((3, 2))},\n"
        "                lambda data, key, split: data,\n"
        "                lambda params, batch: (jnp.mean((params['kernel'] - batch) ** 2), {}),\n"
        "                jnp.zeros((3, 2)))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny(task="my_tasks:make", datasets=None, problems=1, iterations=1)
    rows = run(tmp_path / "run", config)
    assert list(rows[1]["family_loss"]) == ["my_tasks:make"]
    assert 0.5 < rows[1]["loss"] < 1.5


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("nowhere", "is not module:function"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
        ("math:make", "math has no 'make'"),
        ("os:getcwd", "returned a str, not a Task"),
    ],
)
def test_wrong_task_is_named(task, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", tiny(task=task, datasets=None))
