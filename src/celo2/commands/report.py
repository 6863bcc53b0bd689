"""`celo2 report`: a sweep as one page."""

from pathlib import Path

from celo2.evaluate.report import write_report


def report(sweep: str, out: str | None = None) -> None:
    """Make one HTML page of a sweep, which needs no other file: tables, figures, what to doubt.

    Args:
        sweep: the folder of the runs; only its records are read.
        out: the file to write; by default report.html in the sweep's folder.
    """
    print(write_report(sweep, Path(sweep) / "report.html" if out is None else out))
