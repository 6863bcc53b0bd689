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

    def check_kind(self) -> None:
        """Raises a ValueError where the folder holds a run of another command."""
        stored = self.read_config()
        if stored is not None and "iterations" not in stored.get("config", {}):
            raise ValueError(
                f"{self.path} is a folder of `celo2 run`, not of `celo2 meta-train`: its rows are "
                f"in {self.records.name}, `celo2 run … --resume` continues it, and `celo2 plot` "
                "and `celo2 report` show the folder of a whole `celo2 sweep`."
            )

    @property
    def best(self) -> Path:
        """The rule with the lowest held-out score."""
        return self.path / "best.safetensors"
