import numpy as np
import pytest
from tiny_runs import FLAGS, array_files, flip_bit, of_kind, run, shared_programs, tiny

from celo2.runs import records
from celo2.runs.checkpoint import read
from processes import run_processes

pytestmark = pytest.mark.usefixtures("shared_programs")
__all__ = ["shared_programs"]


def run_meta(out, count, *options) -> None:
    run_processes(count, ["meta-train", *FLAGS, "--out", str(out), *options])


def test_two_processes_find_the_gradient_of_one_device(tmp_path):
    run_meta(tmp_path / "two", 2, "--iterations", "2", "--checkpoint-every", "1")
    run(tmp_path / "one", tiny(iterations=2), checkpoint_every=1)
    two, one = (read(tmp_path / name / "checkpoints", 1) for name in ("two", "one"))
    for name in ("w0", "b0", "w1", "b1"):
        moment = f"outer.0.mu.{name}"  # a tenth of the first gradient
        scale = np.abs(one.arrays[moment]).max()
        assert scale > 0
        np.testing.assert_allclose(
            two.arrays[moment], one.arrays[moment], rtol=1e-2, atol=1e-2 * scale
        )
    rows = [of_kind(records.read(tmp_path / n / "records.jsonl"), "train") for n in ("two", "one")]
    for ours, theirs in zip(*rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["inner_steps"] == theirs["inner_steps"]


@pytest.mark.slow
def test_run_of_two_processes_resumes_exactly_and_in_another_number_of_processes(tmp_path):
    run_meta(tmp_path / "whole", 2, "--iterations", "8")
    run_meta(tmp_path / "cut", 2, "--iterations", "4")
    run_meta(tmp_path / "cut", 2, "--iterations", "8", "--resume")
    whole, cut = (read(tmp_path / name / "checkpoints", 8) for name in ("whole", "cut"))
    assert whole.meta["digest"] == cut.meta["digest"]
    rows = run(tmp_path / "cut", tiny(iterations=10), resume=True)
    assert rows[0]["iteration"] == 8 and rows[-1]["iteration"] == 10


@pytest.mark.slow
def test_damage_in_one_process_s_part_sends_all_to_the_checkpoint_before(tmp_path):
    options = ["--checkpoint-every", "2", "--resume", "--iterations"]
    for name in ("whole", "harmed"):
        run_meta(tmp_path / name, 2, *options, "4")
    harmed = tmp_path / "harmed"
    (file, *_) = (f for f in reversed(array_files(harmed, 4)) if "process_1" in str(f))
    flip_bit(file, file.stat().st_size // 2)
    for name in ("whole", "harmed"):
        run_meta(tmp_path / name, 2, *options, "6")
    warnings = of_kind(records.read(harmed / "records.jsonl"), "warning")
    assert "checkpoint of iteration 4 is damaged" in warnings[0]["cause"]
    digests = [read(tmp_path / n / "checkpoints", 6).meta["digest"] for n in ("whole", "harmed")]
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_refusal_ends_all_processes(tmp_path):
    run(tmp_path, tiny(iterations=1))
    with pytest.raises(AssertionError, match="holds a run|Process 0 could not start"):
        run_meta(tmp_path, 2, "--iterations", "1")
