import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import celo2
from celo2 import cli
from celo2.metatrain import loop
from celo2.metatrain.outer import MetaMetrics
from celo2.rule import CELO2, Rule, RuleConfig, feature_count, initial_weights

plots = pytest.importorskip("celo2.metatrain.plots", reason="matplotlib is not installed")

RULE = Rule(CELO2, initial_weights(CELO2, np.random.default_rng(0)))


def train_row(iteration: int, **changes) -> dict:
    """The row of one iteration, as a run makes it."""
    metrics = {name: np.ones(1) for name in MetaMetrics._fields}
    metrics |= {"loss": np.array([1.5]), "family_loss": np.array([[1.0, 2.0]])}
    families = (SimpleNamespace(names=("mnist", "svhn")),)
    run: Any = SimpleNamespace(source=SimpleNamespace(families=families), elapsed=1.0)
    return loop.train_row(run, iteration, MetaMetrics(**metrics), 1.0) | changes


def heldout_row(iteration: int, loss: float) -> dict:
    result = {"loss": loss, "adamw": 0.5, "rate": 0.01, "score": float(np.log(loss / 0.5))}
    return {
        "kind": "heldout",
        "iteration": iteration,
        "score": result["score"],
        "problems": {"mlp": result},
    }


@pytest.fixture
def run(tmp_path):
    """A run's folder with records and a rule."""
    rows = [{"kind": "start", "iteration": 0}, *(train_row(i) for i in range(1, 50))]
    rows += [heldout_row(20, 0.4), heldout_row(40, 0.3), {"kind": "end", "iteration": 49}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "records.jsonl").write_text(text + '{"kind": "tra')
    celo2.save(RULE, tmp_path / "rule.safetensors")
    return tmp_path


def test_plot_writes_every_figure_into_the_folder_asked_for(run, tmp_path, capsys):
    pytest.importorskip("tyro")
    out = tmp_path / "deep" / "figures"
    before = sorted(run.iterdir())
    assert cli.main(["plot", str(run), "--out", str(out)]) == 0
    names = ["first_layer.png", "heldout.png", "meta_loss.png"]
    assert sorted(p.name for p in out.iterdir()) == names
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in out.iterdir())
    assert sorted(run.iterdir()) == sorted([*before, tmp_path / "deep"])
    assert all(name in capsys.readouterr().out for name in names[:1])


def test_plot_draws_what_there_is(run):
    (run / "records.jsonl").unlink()
    assert [p.name for p in plots.plot_run(run)] == ["first_layer.png"]
    (run / "rule.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds neither records.jsonl nor"):
        plots.plot_run(run)


def test_plot_of_no_folder_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        plots.plot_run(tmp_path / "none")


def test_plot_of_a_folder_of_run_says_so(tmp_path):
    (tmp_path / "config.json").write_text('{"config": {"task": "digits-mlp", "steps": 10}}')
    (tmp_path / "records.jsonl").write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(ValueError, match="is a folder of `celo2 run`, not of `celo2 meta-train`"):
        plots.plot_run(tmp_path)


def test_meta_loss_has_a_curve_for_each_dataset_and_one_for_all():
    figure = plots.draw_meta_loss(
        [train_row(1), train_row(2, loss=None, family_loss={"mnist": None})]
    )
    (axes,) = figure.axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    assert {"mnist", "svhn", "all problems"} <= lines.keys()
    assert lines["svhn"][0] == 2.0 and np.isnan(lines["svhn"][1])
    assert lines["all problems"][0] == 1.5


def test_heldout_curves_are_ratios_to_adamw_and_the_best_is_marked():
    figure = plots.draw_heldout([heldout_row(i, x) for i, x in ((1, 0.4), (2, 0.25), (3, 0.3))])
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    np.testing.assert_allclose(lines["mlp"], [0.8, 0.5, 0.6])
    np.testing.assert_allclose(lines["mean"], [0.8, 0.5, 0.6])
    assert "best 0.500 at 2" in lines


def test_first_layer_shows_every_weight_under_its_feature():
    heat, bars = plots.draw_first_layer(RULE).axes[:2]
    np.testing.assert_array_equal(heat.images[0].get_array(), RULE.weights["w0"])
    names = [label.get_text() for label in heat.get_yticklabels()]
    assert names[4] == "momentum 0.99" and names[-1] == "factored momentum 0.999"
    widths = [patch.get_width() for patch in bars.patches]
    np.testing.assert_allclose(widths, np.linalg.norm(RULE.weights["w0"], axis=1), rtol=1e-6)


def test_columns_are_named_by_feature_and_decay():
    config = RuleConfig(momentum_decays=(0.5, 0.6), factored_decays=(0.7, 0.8))
    names = plots.column_names(config)
    assert len(names) == len(set(names)) == feature_count(config)
    assert "momentum over rms 0.6" in names and "inverse row 0.7" in names


def test_rows_told_twice_count_once_and_in_order():
    rows = [train_row(5), train_row(3, loss=1.0), train_row(3, loss=2.0), heldout_row(4, 0.1)]
    assert [(r["iteration"], r["loss"]) for r in plots.of_kind(rows, "train")] == [
        (3, 2.0),
        (5, 1.5),
    ]


def test_smoothing_is_a_mean_of_neighbours_that_skips_what_is_missing():
    values = np.array([1.0, 3.0, np.nan, 5.0, 7.0])
    np.testing.assert_allclose(plots.smooth(values, 0.5), [2, 2, 4, 6, 6])
    np.testing.assert_array_equal(plots.smooth(values, 0.0), values)
    assert np.isnan(plots.smooth(np.array([np.nan]))).all()
