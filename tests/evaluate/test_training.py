import dataclasses
import json
import math

import jax
import numpy as np
import optax
import pytest
from small_runs import of_kind, small, stop_after, train, without_times

from celo2.evaluate import RunConfig, describe, program
from celo2.evaluate.comparison import read_packed
from celo2.evaluate.config import config_from_fields, resolve, run_name
from celo2.evaluate.optimizers import BASELINES
from celo2.evaluate.program import in_precision
from celo2.rule import Rule, initial_weights
from celo2.rulefile import digest, load, pretrained, save
from celo2.runs import checkpoint, records
from celo2.runs.folder import RunFolder, RunRefused, RunTaken, locked
from celo2.tasks import TASKS, supervised
from conftest import REPOSITORY


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of twelve steps that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, train(out)


def test_rows_come_in_the_documented_order(whole_run):
    out, rows = whole_run
    assert records.read(out / "records.jsonl") == rows
    kinds = [(row["kind"], row["step"]) for row in rows]
    assert kinds == [
        ("start", 0),
        ("valid", 0),
        *(("train", 3), ("train", 4), ("valid", 4), ("train", 6), ("train", 8), ("valid", 8)),
        *(("train", 9), ("train", 12), ("valid", 12)),
        ("end", 12),
    ]
    assert not (out / "checkpoints").exists()


def test_start_row_says_what_the_run_is(whole_run):
    start = whole_run[1][0]
    assert config_from_fields(start["config"]) == resolve(small())
    assert start["sizes"]["parameters"] == 2410
    assert start["sizes"]["parameters_by_group"] == {"hidden": 64 * 32, "other": 362}
    assert start["sizes"]["state_bytes"] == 2 * 4 * 2410 + 2 * 4  # two moments, two counts
    assert start["versions"]["jax"] == jax.__version__ and start["hardware"]["devices"] == 1
    assert start["rule"] is None and len(start["data"]) == 64


def test_end_row_has_the_last_validation_and_the_cost(whole_run):
    rows = whole_run[1]
    end = rows[-1]
    assert end["metrics"] == of_kind(rows, "valid")[-1]["metrics"]
    assert end["score"] == end["metrics"]["loss"]
    assert end["finished"] and not end["diverged"]
    assert end["seconds_per_step"] == pytest.approx(end["seconds"] / 12, abs=1e-4)
    assert end["temporary_bytes"] > 0 and end["compile_seconds"] > 0


def test_train_row_is_the_mean_of_its_steps_and_has_the_latest_norms(tmp_path, whole_run):
    single = of_kind(train(tmp_path, small(record_every=1)), "train")
    assert [row["step"] for row in single] == list(range(1, 13))
    first = of_kind(whole_run[1], "train")[0]
    mean = sum(row["metrics"]["loss"] for row in single[:3]) / 3
    assert first["metrics"]["loss"] == pytest.approx(mean, rel=1e-5)
    assert first["update_rms"] == pytest.approx(single[2]["update_rms"], rel=1e-5)
    assert first["param_rms"]["hidden"] == pytest.approx(0.11, abs=0.01)


@pytest.mark.parametrize("optimizer", ["adamw", "celo2"])
@pytest.mark.parametrize("calls", [1, 3])
def test_resume_equals_uninterrupted_run(tmp_path, optimizer, calls):
    config = small(optimizer)
    whole = train(tmp_path / "whole", config)
    part = train(tmp_path / "part", config, stop=stop_after(calls))
    assert part[-1]["kind"] != "end" and (tmp_path / "part" / "checkpoints").exists()
    again = train(tmp_path / "part", config, resume=True)
    assert (again[0]["kind"], again[0]["step"]) == ("resume", part[-1]["step"])
    stored = records.read(tmp_path / "part" / "records.jsonl")
    assert without_times(of_kind(stored, "start", "train", "valid", "end")) == without_times(whole)


def test_reinforcement_learning_is_run_and_resumed_alike(tmp_path):
    pytest.importorskip("gymnax")
    config = RunConfig("minatar-freeway", "adamw", steps=3, batch=2, record_every=1, clip=0.5)
    whole = train(tmp_path / "whole", config)
    assert whole[0]["higher_is_better"] and whole[-1]["score"] == whole[-1]["metrics"]["return"]
    assert [row["metrics"]["env_steps"] for row in of_kind(whole, "train")] == [256, 512, 768]
    train(tmp_path / "part", config, stop=stop_after(1))
    train(tmp_path / "part", config, resume=True)
    stored = records.read(tmp_path / "part" / "records.jsonl")
    assert without_times(of_kind(stored, "start", "train", "valid", "end")) == without_times(whole)


def test_rows_after_the_checkpoint_are_made_again(tmp_path):
    train(tmp_path / "run", stop=stop_after(3), checkpoint_every=3)
    assert checkpoint.list_iterations(tmp_path / "run" / "checkpoints") == [3, 6]
    records.append(tmp_path / "run" / "records.jsonl", {"kind": "train", "step": 8})
    rows = train(tmp_path / "run", resume=True)
    assert rows[0]["step"] == 6
    stored = of_kind(records.read(tmp_path / "run" / "records.jsonl"), "train")
    assert [row["step"] for row in stored] == [3, 4, 6, 8, 9, 12]


def test_damaged_checkpoint_is_put_aside(tmp_path):
    train(tmp_path / "run", stop=stop_after(3), checkpoint_every=3)
    (tmp_path / "run" / "checkpoints" / "6" / "meta" / "metadata").write_text("{")
    assert train(tmp_path / "run", resume=True)[0]["step"] == 3
    assert (tmp_path / "run" / "damaged" / "6").is_dir()


def test_kept_checkpoint_holds_the_trained_parameters(tmp_path, whole_run):
    train(tmp_path / "run", keep=True)
    found, _ = checkpoint.read_newest(tmp_path / "run" / "checkpoints")
    assert found is not None and found.iteration == 12
    assert found.arrays["params.layer_0.kernel"].shape == (64, 32)


def test_finished_run_is_not_made_again(tmp_path, whole_run):
    out, rows = whole_run
    assert train(out, resume=True) == [rows[-1]]


def test_diverging_run_ends_early_and_says_so(tmp_path):
    config = small("sgd", learning_rate=1e30, steps=400, record_every=100, evaluate_every=200)
    rows = train(tmp_path / "run", config)
    end = rows[-1]
    assert end["finished"] and end["diverged"] and end["score"] is None
    assert 1 < end["step"] < 10  # the step whose loss was not finite, not the end of the call
    assert rows[-2]["kind"] == "train" and rows[-2]["metrics"]["loss"] is None
    json.loads((tmp_path / "run" / "records.jsonl").read_text().splitlines()[-1])


def test_folder_with_another_run_is_refused(tmp_path, whole_run):
    out, _ = whole_run
    with pytest.raises(RunRefused, match="holds a run: continue it with --resume"):
        train(out)
    with pytest.raises(RunRefused, match="steps is 24, was 12"):  # though it is finished
        train(out, small(steps=24), resume=True)
    train(tmp_path / "run", stop=stop_after(1))
    with pytest.raises(RunRefused, match="learning_rate is 0.5, was 0.01; seed is 3, was 0"):
        train(tmp_path / "run", small(learning_rate=0.5, seed=3), resume=True)
    with locked(RunFolder(tmp_path / "taken")), pytest.raises(RunTaken, match="is being written"):
        train(tmp_path / "taken")


def test_seed_changes_parameters_and_batches_but_not_the_validation(tmp_path, whole_run):
    other = train(tmp_path, small(seed=1))
    ours, theirs = (of_kind(rows, "valid") for rows in (whole_run[1], other))
    assert ours[0]["metrics"] != theirs[0]["metrics"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "wavy"}, "schedule='wavy' is not one of cosine"),
        ({"precision": "int8"}, "precision='int8' is not one of"),
        ({"learning_rate": math.nan}, "learning_rate=nan must be a positive number"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 must be"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"batch": 6, "accumulate": 4}, "accumulate=4 does not divide batch=6"),
        ({"warmup": 1.0}, r"warmup=1.0 must be in \[0, 1\)"),
        ({"clip": -0.5}, "clip=-0.5 must be"),
        ({"seed": -1}, "seed=-1 must be from 0"),
        ({"evaluation_batches": 0}, "evaluation_batches=0 must be"),
    ],
)
def test_wrong_config_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_wrong_task_and_options_are_named(tmp_path):
    with pytest.raises(ValueError, match="'digit' is not a task"):
        train(tmp_path, RunConfig("digit"))
    with pytest.raises(ValueError, match="text='python-docs' is nothing that digits-mlp takes"):
        train(tmp_path, small(text="python-docs"))
    with pytest.raises(ValueError, match="name the `text`"):
        train(tmp_path, RunConfig("gpt2"))
    with pytest.raises(ValueError, match="stepz is not a field"):
        config_from_fields({"task": "digits-mlp", "stepz": 3})
    with pytest.raises(ValueError, match="steps='3' is not of type int"):
        config_from_fields({"task": "digits-mlp", "steps": "3"})


@pytest.mark.parametrize("name", ["digits-mlp", "text-tiny"])
def test_accumulated_gradient_is_the_big_batch_s(name):
    task = TASKS[name].make(batch=8)
    whole, parts = (supervised(task, optax.sgd(1.0), 2, accumulate=n) for n in (1, 4))
    state = whole.init(jax.random.key(0))
    stepped = (trainer.step(state, jax.random.key(1)) for trainer in (whole, parts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), *stepped)
    valid = [trainer.evaluate(state, jax.random.key(2))["loss"] for trainer in (whole, parts)]
    assert float(valid[1]) == pytest.approx(float(valid[0]), rel=1e-5)


def test_unchained_steps_are_the_chained_ones(tmp_path, whole_run, monkeypatch):
    monkeypatch.setattr(program, "_is_slow_in_loops", lambda *_: True)
    monkeypatch.setattr(program, "_programs", {})
    ours, theirs = (of_kind(rows, "train") for rows in (train(tmp_path), whole_run[1]))
    for one, other in zip(ours, theirs, strict=True):
        assert one["step"] == other["step"]
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-4)


@pytest.mark.parametrize(("name", "chained"), [("digits-conv", False), ("vit-tiny", True)])
def test_convolutions_are_not_chained_on_a_cpu(name, chained):
    assert program.set_up(resolve(RunConfig(name, "sgd")), blank=True).chained == chained


def test_accumulated_run_equals_the_whole_one(tmp_path, whole_run):
    rows = train(tmp_path, small(accumulate=4))
    assert rows[-1]["score"] == pytest.approx(whole_run[1][-1]["score"], rel=1e-3)


def test_half_precision_computes_in_it_and_keeps_parameters_whole(tmp_path):
    task = in_precision(TASKS["text-tiny"].make(batch=2), jax.numpy.bfloat16)
    params = task.init(jax.random.key(0))
    batch = task.sample(task.data, jax.random.key(1), "train")
    text = str(jax.make_jaxpr(jax.grad(task.loss, has_aux=True))(params, batch))
    assert "bf16[2,64,64]" in text
    grads, _ = jax.jit(jax.grad(task.loss, has_aux=True))(params, batch)
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}


def test_name_differs_for_every_config_and_rule():
    configs = [small(), small(seed=1), small(learning_rate=2e-2), small(clip=1.0)]
    names = {run_name(config, None) for config in configs} | {run_name(small(), "ab")}
    assert len(names) == 5
    assert run_name(small(), None).startswith("digits-mlp_adamw_lr0.01_wd0_seed0_")
    assert "/" not in run_name(dataclasses.replace(small(), optimizer="a/b c.safetensors"), "ab")


def test_field_that_came_later_leaves_known_names_as_they_are():
    index, _ = read_packed(REPOSITORY / "results" / "lm-0.8m.jsonl")
    for name, fields in index["tuning"].items():
        config = config_from_fields(fields)
        if config.optimizer in BASELINES:  # rules change, and with them the names
            assert run_name(config, None) == name
    assert run_name(small(scale="spectral"), None) != run_name(small(), None)


def test_resolved_config_has_the_task_s_own_numbers():
    config = resolve(RunConfig("digits-conv"))
    assert (config.steps, config.batch, config.evaluate_every) == (1000, 64, 100)


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"),
    [pytest.param("adamw", 8.0, marks=pytest.mark.slow), ("celo2", 11.7)],
)
def test_largest_model_is_described_without_data(optimizer, bytes_per_parameter):
    facts = describe(RunConfig("gpt3xl", optimizer, accumulate=8, precision="bfloat16"))
    assert facts["parameters"] == 24 * 12 * 2048**2 + 2 * 50_304 * 2048
    assert facts["tokens_per_step"] == 512 * 2048
    ratio = facts["state_bytes"] / facts["parameters"]
    assert ratio == pytest.approx(bytes_per_parameter, rel=0.05)
    assert facts["rates"][620] == 1e-3 and facts["rates"][0] == 0.0


def test_rules_of_one_config_share_a_compiled_program(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "_programs", {})
    base = pretrained("celo2")
    scores = []
    for seed in (0, 1):
        weights = initial_weights(base.config, np.random.default_rng(seed))
        path = tmp_path / f"{seed}.safetensors"
        save(Rule(base.config, weights), path)
        rows = train(tmp_path / str(seed), small(str(path)))
        assert rows[0]["rule"] == digest(load(path))
        scores.append(rows[-1]["score"])
    assert len(program._programs) == 1 and scores[0] != scores[1]
    train(tmp_path / "shipped", small("celo2"))
    assert len(program._programs) == 1
    train(tmp_path / "adam", small("celo2-adam"))
    assert len(program._programs) == 2
