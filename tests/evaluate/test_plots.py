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
    assert len(capsys.readouterr().out.splitlines()) == 4


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


def test_thinned_curve_keeps_the_mean():
    points = [(float(step), math.sin(step)) for step in range(1000)]
    thinned = plots.thin(points, bins=10)
    assert len(thinned) == 10
    assert sum(y for _, y in thinned) / 10 == pytest.approx(sum(y for _, y in points) / 1000)
