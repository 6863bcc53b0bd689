"""Measures optimizers: training runs, sweeps over learning rates, and their records."""

from celo2.evaluate.config import RunConfig
from celo2.evaluate.program import describe
from celo2.evaluate.recipe import Recipe, read_recipe
from celo2.evaluate.sweeps import sweep
from celo2.evaluate.training import run

__all__ = ["Recipe", "RunConfig", "describe", "read_recipe", "run", "sweep"]
