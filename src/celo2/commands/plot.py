"""`celo2 plot`: a run's figures."""

from celo2.metatrain.plots import plot_run


def plot(run: str, out: str | None = None) -> None:
    """Draw a meta-training run: meta-loss, held-out problems, the rule's first layer.

    Args:
        run: the run's folder; only its records and its rule are read.
        out: the folder for the figures; the run's own by default.
    """
    for path in plot_run(run, out):
        print(path)
