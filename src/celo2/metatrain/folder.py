"""The folder of a meta-training run: a run's files, and the rules it makes."""

from dataclasses import dataclass
from pathlib import Path

from celo2.runs.folder import RunFolder


@dataclass(frozen=True)
class MetaFolder(RunFolder):
    """The files of one meta-training run."""

    @property
    def rule(self) -> Path:
        """The rule at the newest checkpoint."""
        return self.path / "rule.safetensors"

    @property
    def best(self) -> Path:
        """The rule with the lowest held-out score."""
        return self.path / "best.safetensors"
