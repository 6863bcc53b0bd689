"""A run's folder: where its files are, and the lock that keeps a second process out."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from celo2.rulefile import write_whole

PROBE_SECONDS = 0.5


class RunRefused(ValueError):
    """Says why a run was not started or continued."""


class RunTaken(RunRefused):
    """Says that another process is writing to the run's folder."""


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.json"  # what it was started with: config, checksums, version
        self.records = path / "records.jsonl"  # every row
        self.checkpoints = path / "checkpoints"  # the newest, one folder each, named by iteration
        self.damaged = path / "damaged"  # checkpoints that could not be read, put aside
        self.lock_file = path / "lock"  # held by the process that writes
        self.owner_file = path / "owner.json"  # which process that is, or was

    def has_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.exists() or self.checkpoints.exists()

    def read_config(self) -> dict[str, Any] | None:
        """The content of config.json, None if there is none."""
        try:
            return json.loads(self.config.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise ValueError(f"{self.config} is not JSON: {error}.") from error

    def write_config(self, content: dict[str, Any]) -> None:
        write_whole(self.config, json.dumps(content, indent=2).encode() + b"\n")


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Makes the folder and holds its lock, which is released when the process ends."""
    folder.path.mkdir(parents=True, exist_ok=True)
    # `is_alive` holds the lock for an instant: a writer waits that long.
    lock = FileLock(folder.lock_file, timeout=PROBE_SECONDS)
    try:
        lock.acquire(poll_interval=0.02)
    except Timeout as error:
        owner = read_owner(folder)
        raise RunTaken(
            f"{folder.path} is being written by process {owner.get('pid', '?')} on "
            f"{owner.get('host', '?')}: stop that one first, or choose another --out."
        ) from error
    try:
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        write_whole(folder.owner_file, json.dumps(owner).encode())
        yield
    finally:
        lock.release()


def is_alive(folder: RunFolder) -> bool:
    """Whether a process is writing to the folder, also on other machines that share its locks."""
    if not folder.lock_file.exists():
        return False
    try:
        with FileLock(folder.lock_file, timeout=0):
            return False
    except Timeout:
        return True


def read_owner(folder: RunFolder) -> dict[str, Any]:
    """The process that last held the lock: pid, host, since; empty if unknown."""
    try:
        owner = json.loads(folder.owner_file.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}
