import sys

import pytest

from celo2.commands import progress


def test_trackers_get_the_numbers_of_a_row():
    row = {"kind": "train", "iteration": 3, "loss": 1.5, "family_loss": {"mnist": 2.0}, "x": None}
    assert progress.scalars(row) == {"train/loss": 1.5, "train/family_loss/mnist": 2.0}
    assert progress.scalars({"kind": "end", "iteration": 3}) == {}
    row = {"kind": "valid", "step": 3, "metrics": {"loss": 1.5}}
    assert progress.scalars(row) == {"valid/metrics/loss": 1.5}


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda out: progress.tensorboard(out), "tensorboardX"),
        (lambda out: progress.wandb(out, {}), "wandb"),
    ],
)
def test_missing_tracker_is_named(make, package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"needs {package}.*: pip install"):
        make(tmp_path)


def test_rows_reach_wandb(tmp_path, monkeypatch):
    sent = []

    class Run:
        def log(self, values, step):
            sent.append((step, values))

        def finish(self):
            sent.append("finished")

    class Client:
        init = staticmethod(lambda **options: Run())

    monkeypatch.setitem(sys.modules, "wandb", Client)
    send = progress.wandb(tmp_path, {})
    send({"kind": "train", "iteration": 3, "loss": 1.5})
    send({"kind": "end", "iteration": 3})
    assert sent == [(3, {"train/loss": 1.5}), "finished"]


def test_tensorboard_writes_to_the_run_folder(tmp_path):
    pytest.importorskip("tensorboardX")
    send = progress.tensorboard(tmp_path)
    send({"kind": "train", "iteration": 3, "loss": 1.5})
    send({"kind": "end", "iteration": 3})
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in file.read_bytes()
