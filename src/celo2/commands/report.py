"""`celo2 report` and `celo2 plot`: what records show, as one page or as figures."""

from pathlib import Path

from celo2.evaluate.comparison import is_sweep
from celo2.evaluate.comparison import pack as write_packed
from celo2.evaluate.plots import plot_sweep
from celo2.evaluate.report import write_report
from celo2.metatrain.plots import plot_run
from celo2.runs.address import search_working_directory


def report(sweep: str, out: str | None = None, pack: str | None = None) -> None:
    """Make one HTML page of a sweep, which needs no other file: tables, figures, what to doubt.

    Args:
        sweep: the folder of the runs, or one packed file; only records are read.
        out: the file to write; by default report.html in the sweep's folder, or beside the file.
        pack: write the records of the folder to this one file as well, with sixteen train rows of
            each run.
    """
    search_working_directory()
    if pack is not None:
        count = write_packed(sweep, pack)
        print(f"{pack}: {count} runs")
    home = Path(sweep)
    default = home / "report.html" if home.is_dir() else home.with_suffix(".html")
    print(write_report(sweep, default if out is None else out))


def plot(run: str, out: str | None = None) -> None:
    """Draw a meta-training run or a sweep, whichever the folder holds; only records are read.

    Of a meta-training run: meta-loss, held-out problems, the rule's first layer. Of a sweep, for
    each task: curves, learning rates, RMS of updates and of parameters.

    Args:
        run: the folder of the run, or of the sweep's runs.
        out: the folder for the figures; the run's own by default, of a sweep `figures` in it.
    """
    search_working_directory()
    for path in plot_sweep(run, out) if is_sweep(run) else plot_run(run, out):
        print(path)
