"""`celo2 plot`: the figures of a meta-training run or of a sweep."""

from celo2.evaluate.comparison import is_sweep
from celo2.evaluate.plots import plot_sweep
from celo2.metatrain.plots import plot_run
from celo2.runs.address import search_working_directory


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
