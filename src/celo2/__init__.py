"""Learned optimization made practical: rules as files, optimizers for JAX and PyTorch."""

from importlib.metadata import PackageNotFoundError, version

from celo2.rule import CELO2, CELO2_BASE, Rule, RuleConfig
from celo2.rulefile import load, pretrained, save

try:
    __version__ = version("celo2")
except PackageNotFoundError:  # a source tree on the path, never installed
    __version__ = "0+unknown"

__all__ = ["CELO2", "CELO2_BASE", "Rule", "RuleConfig", "load", "pretrained", "save"]
