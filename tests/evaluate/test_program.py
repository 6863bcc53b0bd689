"""Runs whose batches come from the host, step by step."""

import numpy as np
import pytest
from small_runs import of_kind, small, stop_after, train, without_times

from celo2.evaluate import RunConfig, program
from celo2.evaluate.config import resolve
from celo2.rulefile import save
from celo2.runs import records
from celo2.tasks import Part
from conftest import run_python
from lstm_rules import SMALL, random_rule
from processes import run_processes

pytest.importorskip("grain")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from celo2.tasks.tokens import make_tokens

    home = tmp_path_factory.mktemp("tokens")
    (home / "numbers.txt").write_text("".join(f"{i} is not {i + 1}\n" for i in range(20_000)))
    make_tokens(home / "bytes", [home / "numbers.txt"], tokenizer="bytes", valid_every=4)
    return home / "bytes"


def config_of(folder, **changes) -> RunConfig:
    fields = {"learning_rate": 1e-2, "steps": 6, "batch": 4, "record_every": 2}
    fields |= {"evaluate_every": 6, "evaluation_batches": 3}
    return RunConfig("text-tiny", "adamw", text=str(folder), **(fields | changes))


def test_streamed_run_learns_and_resumes_at_the_exact_batch(tmp_path, folder):
    whole = train(tmp_path / "whole", config_of(folder))
    first, last = of_kind(whole, "valid")[:: len(of_kind(whole, "valid")) - 1]
    assert last["metrics"]["loss"] < first["metrics"]["loss"]
    assert whole[0]["sizes"]["tokens_per_step"] == 4 * 64
    train(tmp_path / "part", config_of(folder), stop=stop_after(2))
    again = train(tmp_path / "part", config_of(folder), resume=True)
    assert again[0]["kind"] == "resume" and 0 < again[0]["step"] < 6
    stored = records.read(tmp_path / "part" / "records.jsonl")
    assert without_times(of_kind(stored, "start", "train", "valid", "end")) == without_times(whole)


def test_other_seed_sees_other_batches_and_equal_validation(tmp_path, folder):
    runs = [train(tmp_path / str(s), config_of(folder, seed=s, steps=2)) for s in (0, 1)]
    first, second = ([row["metrics"]["loss"] for row in of_kind(r, "train")] for r in runs)
    assert first != second


def test_every_lstm_rule_starts_from_its_own_state(tmp_path, monkeypatch):
    def uncompiled(config, rule, data, mesh):
        setup = program.set_up(config, data, mesh, rule=rule)
        return program.RunProgram(setup, {}, None, None, 0.0, None)

    monkeypatch.setattr(program, "_programs", {})
    monkeypatch.setattr(program, "_compile_program", uncompiled)
    for seed in (0, 1):  # of one config, so that they share a program
        rule = random_rule(SMALL["celo"], seed)
        save(rule, tmp_path / f"{seed}.safetensors")
        config = resolve(small(f"celo={tmp_path / f'{seed}.safetensors'}"))
        state = program.build_program(config).start(0)
        np.testing.assert_array_equal(state.optimizer.inner.hidden, rule.weights["lstm.hidden"])
    assert len(program._programs) == 1


def losses(out) -> list[float]:
    rows = of_kind(records.read(out / "records.jsonl"), "train", "valid")
    return [row["metrics"]["loss"] for row in rows]


@pytest.mark.slow
def test_streamed_batches_on_a_mesh_give_the_losses_of_one_device(tmp_path, folder):
    train(tmp_path / "one", config_of(folder))
    code = f"""
from celo2.evaluate import RunConfig, run
from celo2.runs.processes import make_mesh
list(run({config_of(folder)!r}, {str(tmp_path / "four")!r},
         mesh=make_mesh({{"data": 2, "model": 2}})))
"""
    run_python(code, devices=4, timeout=300)
    np.testing.assert_allclose(losses(tmp_path / "four"), losses(tmp_path / "one"), rtol=2e-5)


@pytest.mark.slow
def test_two_processes_that_read_their_own_rows_give_the_losses_of_one(tmp_path, folder):
    options = f"run text-tiny --optimizer adamw --learning-rate 1e-2 --text {folder} --batch 4 "
    options += "--record-every 2 --evaluate-every 6 --evaluation-batches 3 --steps 6"
    train(tmp_path / "one", config_of(folder))
    for mesh in ("data=4", "data=2,model=2"):
        out = tmp_path / mesh
        run_processes(2, [*options.split(), "--mesh", mesh, "--out", str(out)])
        np.testing.assert_allclose(losses(out), losses(tmp_path / "one"), rtol=2e-5)


def test_parts_of_two_processes_make_up_the_batch_of_one(folder):
    from celo2.tasks import TASKS

    stream = TASKS["text-tiny"].make(text=str(folder), batch=4).data
    whole = next(stream.batches("train", 0, 5, Part()))
    parts = [next(stream.batches("train", 0, 5, Part(i, 2))) for i in range(2)]
    assert sorted(map(bytes, np.concatenate(parts))) == sorted(map(bytes, whole))
