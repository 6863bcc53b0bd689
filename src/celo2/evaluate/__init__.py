"""Measures optimizers: training runs, sweeps over learning rates, and their records."""

from celo2.evaluate.comparison import summarize
from celo2.evaluate.config import RunConfig
from celo2.evaluate.program import describe
from celo2.evaluate.recipe import Recipe, read_recipe
from celo2.evaluate.run import run
from celo2.evaluate.sweep import sweep

__all__ = ["Recipe", "RunConfig", "describe", "read_recipe", "run", "summarize", "sweep"]
