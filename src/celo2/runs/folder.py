"""A run's folder: where its files are, and the lock that keeps a second process out."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celo2.rulefile import write_whole

PROBE_SECONDS = 0.5  # `is_alive` holds the lock for an instant; a writer waits that long


class RunRefused(ValueError):
    """A run that was not started or continued, and why."""


class RunTaken(RunRefused):
    """A run that another process is writing."""


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """What the run was started with: config, data checksums, version."""
        return self.path / "config.json"

    @property
    def records(self) -> Path:
        """Every row, as JSON lines."""
        return self.path / "records.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The newest checkpoints, one folder for each, named by iteration."""
        return self.path / "checkpoints"

    @property
    def damaged(self) -> Path:
        """Checkpoints that could not be read, put aside."""
        return self.path / "damaged"

    @property
    def lock_file(self) -> Path:
        """Held by the process that writes; says which one it is."""
        return self.path / "lock"

    def has_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.exists() or self.checkpoints.exists()

    def read_config(self) -> dict[str, Any] | None:
        """What config.json holds, None where there is none."""
        try:
            return json.loads(self.config.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{self.config} is not JSON: {error}.") from error

    def write_config(self, content: dict[str, Any]) -> None:
        write_whole(self.config, json.dumps(content, indent=2).encode() + b"\n")


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Makes the folder and holds its lock, which dies with the process."""
    folder.path.mkdir(parents=True, exist_ok=True)
    file = os.open(folder.lock_file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(file, folder)
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(owner).encode(), 0)
        yield
    finally:
        os.close(file)


def is_alive(folder: RunFolder) -> bool:
    """Whether a process writes to the folder; sees other machines where the file system does."""
    try:
        file = os.open(folder.lock_file, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(file)


def read_owner(folder: RunFolder) -> dict[str, Any]:
    """The process that last held the lock: pid, host, since; empty if unknown."""
    try:
        owner = json.loads(folder.lock_file.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _take(file: int, folder: RunFolder) -> None:
    deadline = time.monotonic() + PROBE_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                break
        time.sleep(0.02)
    owner = read_owner(folder)
    raise RunTaken(
        f"{folder.path} is being written by process {owner.get('pid', '?')} on "
        f"{owner.get('host', '?')}: stop that one first, or choose another --out."
    )
