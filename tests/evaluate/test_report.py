import io
import math
from html.parser import HTMLParser

import numpy as np
import pytest
from hand_made import config_of, rows_of, write_sweep

from celo2 import cli
from celo2.evaluate import comparison
from celo2.evaluate.comparison import caveats

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
from celo2.evaluate import plots, report  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    """AdamW's best is 1.0, at the middle of three rates; muon's 0.5, at the lower of two, with two
    seeds; lion diverges; sgd, under a name that is HTML, does not reach AdamW."""
    tuning = [
        *(
            (config_of("adamw", r), [3.0, 2.0, x])
            for r, x in ((1e-3, 1.5), (1e-2, 1.0), (1e-1, 2.5))
        ),
        (config_of("muon", 1e-2), [3.0, 2.0, 0.4]),
        (config_of("muon", 1e-1), [3.0, 2.0, 1.0]),
        (config_of("lion", 1e-2), [3.0, None, None]),
        (config_of("sgd", 1e-2, label="<i>$\\bad"), [3.0, 2.5, 2.0]),
    ]
    final = [(config_of("muon", 1e-2, s), [3.0, 2.0, x]) for s, x in ((0, 0.4), (1, 0.6))]
    write_sweep(
        tmp_path / "sweep",
        [(c, rows_of(c, x, diverged=x[-1] is None)) for c, x in tuning],
        [(c, rows_of(c, x)) for c, x in final],
    )
    return tmp_path / "sweep"


@pytest.fixture
def entries(folder):
    return {entry.label: entry for entry in comparison.read_sweep(folder).tasks["digits-mlp"]}


def test_spread_is_mean_and_range_of_what_is_there():
    assert comparison.score_range([1.0, None, 3.0, 5.0]) == (3.0, 1.0, 5.0, 3)
    assert comparison.score_range([None]) is None


def test_steps_to_reach_are_interpolated_at_the_first_crossing():
    points = [(0, 4.0), (10, 2.0), (20, 3.0), (30, 1.0)]
    assert comparison.steps_to_reach(points, 2.5, higher=False) == 7.5
    assert comparison.steps_to_reach(points, 2.0, higher=False) == 10
    assert comparison.steps_to_reach(points, 0.5, higher=False) is None
    assert comparison.steps_to_reach([(0, 0.1), (10, 0.9)], 0.3, higher=True) == pytest.approx(2.5)
    assert comparison.steps_to_reach([(0, 0.1)], 0.0, higher=True) == 0


def test_speed_up_is_of_the_mean_over_seeds(folder, entries):
    sweep = comparison.read_sweep(folder)
    # From 2.0 at step 50 to the mean 0.5 at step 100: 1.0 is two thirds of the way.
    found = comparison.reach(sweep, entries["muon"], entries["adamw"])
    assert found is not None
    assert found.steps == pytest.approx(50 + 50 * 2 / 3)
    assert found.speed_up == pytest.approx(100 / found.steps)
    own = comparison.reach(sweep, entries["adamw"], entries["adamw"])
    assert own == (100, 1.0)
    assert comparison.reach(sweep, entries["<i>$\\bad"], entries["adamw"]) is None
    assert comparison.reach(sweep, entries["lion"], entries["adamw"]) is None


def test_edge_of_the_range_is_found(entries):
    edges = {label: comparison.edge_of(entry) for label, entry in entries.items()}
    assert edges == {"adamw": None, "muon": "lowest", "lion": None, "<i>$\\bad": None}


def test_sensitivity_has_every_rate_and_none_where_it_diverged(entries):
    assert comparison.sensitivity(entries["adamw"]) == [(1e-3, 1.5), (1e-2, 1.0), (1e-1, 2.5)]
    assert comparison.sensitivity(entries["lion"]) == [(1e-2, None)]


def test_final_seeds_stand_for_the_best_setting(entries):
    assert [run.score for run in entries["muon"].seeds] == [0.4, 0.6]
    assert [run.score for run in entries["adamw"].seeds] == [1.0]  # there are no final ones
    assert entries["lion"].seeds == ()


def test_curve_takes_the_last_row_of_a_step_and_passes_over_null():
    rows = [
        {"kind": "valid", "step": s, "metrics": {"loss": x}}
        for s, x in ((5, 2.0), (0, 3.0), (5, 1.0), (9, None))
    ]
    assert comparison.curve(rows, "valid", "metrics", "loss") == [(0, 3.0), (5, 1.0)]
    assert comparison.mean_curve([[(0, 1.0), (5, 2.0)], [(5, 4.0), (9, 1.0)]]) == [(5, 3.0)]
    assert comparison.mean_curve([]) == []


def test_notes_tell_what_is_unfair(entries):
    text = "\n".join(caveats(list(entries.values())))
    assert "Unequal tuning budgets, which favour the larger: adamw 3, muon 2, lion 1" in text
    assert "muon: its best rate, 0.01, is the lowest tried" in text
    assert "adamw: a single seed" in text and "muon: a single seed" not in text
    assert "lion: no setting came to a score" in text
    assert "lion: one learning rate only" in text
    assert caveats([entries["adamw"]])[0] == "Equal tuning budgets: 3 for each optimizer, in runs."


def test_notes_tell_of_runs_that_failed_or_have_not_ended(tmp_path):
    done, failed, waiting = (config_of("adamw", rate) for rate in (1e-3, 1e-2, 1e-1))
    whole = rows_of(done, [3.0, 1.0])
    broken = [*rows_of(failed, [3.0, 1.0])[:2], {"kind": "failed", "error": "OSError: no disk"}]
    write_sweep(tmp_path, [(done, whole), (failed, broken), (waiting, [])])
    sweep = comparison.read_sweep(tmp_path)
    text = "\n".join(caveats(sweep.tasks["digits-mlp"]))
    assert "adamw: 1 of 3 runs have not ended" in text
    assert "adamw: 1 of 3 runs failed, as with OSError: no disk" in text
    assert ("runs", "1 of 3 ended") in report.facts(sweep)
    report.build_page(sweep)


def test_tables_have_the_numbers_of_the_records(folder):
    sweep = comparison.read_sweep(folder)
    rows = {row[0]: row for row in report.score_table(sweep, "digits-mlp")}
    assert rows["adamw"][1:] == ["0.01", "0", "1.000", "–", "1", "3", "0", "100", "1.00×"]
    assert rows["muon"][1:] == [
        "0.01",
        "0",
        "0.5000",
        "0.4000 … 0.6000",
        "2",
        "2",
        "0",
        "83",
        "1.20×",
    ]
    assert rows["lion"][1:] == ["–", "–", "–", "–", "0", "1", "1", "–", "–"]
    assert rows["<i>$\\bad"][-2:] == ["not reached", "not reached"]
    costs = {row[0]: row for row in report.cost_table(sweep, "digits-mlp")}
    assert costs["muon"][1:] == ["20", "1.00×", "3.0", "1.5 MB", "–"]
    assert costs["lion"][1:] == ["–"] * 5


class Tags(HTMLParser):
    """Keeps the tags and the text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_page_stands_alone_and_escapes_what_it_shows(folder, capsys):
    assert cli.main(["report", str(folder)]) == 0
    path = folder / "report.html"
    assert capsys.readouterr().out.strip() == str(path)
    page = Tags(path.read_text("utf-8"))
    names = [tag for tag, _ in page.tags]
    assert "i" not in names and "b" not in names and "script" not in names
    assert "<i>$\\bad" in page.text and "celo2 sweep <b>&" in page.text
    assert "celo2 9.8" in page.text and "device abacus" in page.text and "1970-01-01" in page.text
    sources = [attrs[key] for _, attrs in page.tags for key in ("src", "href") if key in attrs]
    assert len(sources) == 4 and all(s.startswith("data:image/svg+xml;base64,") for s in sources)
    assert (
        "meta",
        {"name": "viewport", "content": "width=device-width, initial-scale=1"},
    ) in page.tags


def test_page_is_the_same_when_made_again(folder):
    first, second = (report.build_page(comparison.read_sweep(folder)) for _ in range(2))
    assert first == second


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no sweep.json: give the --out of `celo2 sweep`"),
        ('{"tuning": {}, "final": {}}', "has ended: let `celo2 sweep` go on first"),
        ("{", "lists no runs"),
        ("[]", "lists no runs"),
    ],
)
def test_folder_without_results_is_refused(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "sweep.json").write_text(content)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
