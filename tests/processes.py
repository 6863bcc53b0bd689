"""A command in several processes that find each other on this machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from conftest import QUICK_FLAGS

DEVICES = 2  # of each process


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start_processes(stack: ExitStack, count: int, options: Sequence[str]) -> list[subprocess.Popen]:
    """`celo2` with these options in `count` processes, which die with the stack."""
    environment = os.environ | {"XLA_FLAGS": QUICK_FLAGS}
    command = [sys.executable, "-m", "celo2.cli", *options, "--devices", str(DEVICES)]
    command += ["--coordinator", f"localhost:{free_port()}", "--process-count", str(count)]
    processes = [
        stack.enter_context(
            subprocess.Popen(
                [*command, "--process-id", str(number)],
                env=environment,
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
            )
        )
        for number in range(count)
    ]
    for process in processes:
        stack.callback(process.kill)  # SIGTERM would be caught, and saved first
    return processes


def run_processes(count: int, options: Sequence[str]) -> None:
    """The same to the end, which must be a good one in every process."""
    with ExitStack() as stack:
        processes = start_processes(stack, count, options)
        errors = [process.communicate(timeout=300)[1] for process in processes]
        codes = [process.returncode for process in processes]
    assert codes == [0] * count, "\n".join(errors)
