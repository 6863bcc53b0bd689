from html.parser import HTMLParser

import pytest
from hand_made import config_of, example_sweep, rows_of, write_sweep

from celo2 import cli
from celo2.evaluate import comparison

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
from celo2.evaluate import report  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    return example_sweep(tmp_path / "sweep")


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
    assert len(sources) == 5 and all(s.startswith("data:image/svg+xml;base64,") for s in sources)
    assert (
        "meta",
        {"name": "viewport", "content": "width=device-width, initial-scale=1"},
    ) in page.tags


def test_page_is_the_same_when_made_again(folder):
    first, second = (report.build_page(comparison.read_sweep(folder)) for _ in range(2))
    assert first == second


def test_page_tells_of_what_cannot_be_compared_and_who_wins(tmp_path):
    adamw, muon = config_of("adamw", 1e-2), config_of("muon", 1e-2)
    runs = [(c, rows_of(c, [3.0, x])) for c, x in ((adamw, 1.0), (muon, 0.5))]
    again = config_of("muon", 1e-2, seed=1)
    for (_, rows), data in zip(runs, ("a" * 64, "b" * 64), strict=True):
        rows[0]["data"] = data
    waiting = (config_of("muon", 1e-1), [])
    lost = (again, rows_of(again, [3.0, None], diverged=True))
    write_sweep(tmp_path, [*runs, waiting], [runs[1], lost])
    sweep = comparison.read_sweep(tmp_path)
    assert ("runs", "3 of 4 ended") in report.facts(sweep)
    page = report.build_page(sweep)
    assert "data differ" in page and "1 of 2 seeds diverged" in page
    assert '<tr class="best"><td>adamw' in page  # muon, which is lower, lost a seed
