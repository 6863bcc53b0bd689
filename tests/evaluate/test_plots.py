import dataclasses
import io
import math

import numpy as np
import pytest
from hand_made import config_of, example_sweep, rows_of, write_sweep

from celo2 import cli
from celo2.evaluate import comparison

plots = pytest.importorskip("celo2.evaluate.plots", reason="matplotlib is not installed")


@pytest.fixture
def folder(tmp_path):
    return example_sweep(tmp_path / "sweep")


def test_plot_draws_the_sweep_that_the_folder_holds(folder, tmp_path, capsys):
    assert cli.main(["plot", str(folder), "--out", str(tmp_path / "out")]) == 0
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == sorted(f"digits-mlp_{name}.png" for name in plots.FIGURES)
    assert len(capsys.readouterr().out.splitlines()) == len(plots.FIGURES)


def test_rates_that_diverged_are_marked(folder):
    axes = plots.draw_rates(comparison.read_sweep(folder), "digits-mlp").axes[0]
    marks = [line for line in axes.lines if line.get_marker() == "x"]
    crosses = [np.asarray(line.get_xdata()).tolist() for line in marks]
    assert [rates for rates in crosses if rates] == [[1e-2]]


@pytest.mark.parametrize("length", [5, 12, 30])
def test_legend_fits_into_its_figure(tmp_path, length):
    labels = [f"{i}".ljust(length, "x") for i in range(5)]
    runs = [(config_of("sgd", 2.15e-4, label=label), [3.0, 2.0, 1.0]) for label in labels]
    write_sweep(tmp_path, [(c, rows_of(c, losses)) for c, losses in runs], [])
    figure = plots.draw_curves(comparison.read_sweep(tmp_path), "digits-mlp")
    plots.write_svg(figure, io.BytesIO())
    place = figure.legends[0].get_window_extent()
    assert place.x0 >= 0 and place.x1 <= figure.bbox.width


def test_settings_have_an_axis_for_all_that_was_varied_and_a_line_for_each_run(folder):
    figure = plots.draw_settings(comparison.read_sweep(folder), "digits-mlp")
    adamw, muon, lion, _ = figure.axes
    names = [label.get_text() for label in adamw.get_xticklabels()]
    assert names == ["rate", "seed", "loss"]  # all decays are the same
    runs = {axes: [x for x in axes.lines if len(x.get_xdata()) == 3] for axes in figure.axes}
    assert [len(runs[axes]) for axes in (adamw, muon, lion)] == [3, 3, 1]
    middle = runs[adamw][1].get_ydata()
    # 1e-2 of 1e-3 … 1e-1, the first of two seeds, and 1.0 of 0.4 … 2.5.
    np.testing.assert_allclose(middle, [0.5, 0.0, 0.6 / 2.1])
    assert runs[lion][0].get_linestyle() == "--" and runs[lion][0].get_ydata()[-1] > 1


def test_sizes_are_lines_of_one_figure(tmp_path):
    names = ["lm-width-256", "lm-width-64", "digits-mlp"]
    runs = [
        (dataclasses.replace(config_of("sgd", rate), task=task), [3.0, loss])
        for task in names
        for rate, loss in ((1e-3, 2.0), (1e-2, 1.0), (1e-1, 4.0))
    ]
    folder = tmp_path / "sweep"
    write_sweep(folder, [(c, rows_of(c, losses)) for c, losses in runs])
    sweep = comparison.read_sweep(folder)
    (tasks,) = plots.sizes_of(sweep)
    assert tasks == ["lm-width-64", "lm-width-256"]
    (axes,) = plots.draw_sizes(sweep, tasks).axes
    stars = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "*"]
    assert stars == [[[1e-2, 1.0]]] * 2
    assert (tmp_path / "out" / "lm-width_sizes.png") in plots.plot_sweep(folder, tmp_path / "out")


def test_intervals_are_drawn_for_several_seeds(tmp_path):
    seeds = [
        (config_of(name, 1e-2, seed), [3.0, loss + seed])
        for name, loss in (("adamw", 2.0), ("muon", 1.0))
        for seed in range(3)
    ]
    write_sweep(tmp_path, [(c, rows_of(c, x)) for c, x in seeds])
    (axes,) = plots.draw_intervals(comparison.read_sweep(tmp_path)).axes
    bars = [np.asarray(line.get_xdata()).tolist() for line in axes.lines]
    assert bars[1::2] == [[2.0], [3.0]]  # means, from below: muon's, AdamW's
    assert all(low < high for low, high in bars[::2])
    assert tmp_path / "figures" / "intervals.png" in plots.plot_sweep(tmp_path)


def test_thinned_curve_keeps_the_mean():
    points = [(float(step), math.sin(step)) for step in range(1000)]
    thinned = plots.thin(points, bins=10)
    assert len(thinned) == 10
    assert sum(y for _, y in thinned) / 10 == pytest.approx(sum(y for _, y in points) / 1000)
