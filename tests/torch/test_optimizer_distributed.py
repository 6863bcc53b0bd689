"""Sharded and data-parallel training, in processes that run all of `torch_processes.py`."""

import functools
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import torch_processes

WORKER = Path(torch_processes.__file__)


@pytest.fixture(scope="module")
def run_processes(tmp_path_factory):
    """A function of the number of processes: what happened in each one."""

    @functools.cache
    def run(count: int) -> list[dict[str, str]]:
        folder = tmp_path_factory.mktemp("processes")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with ExitStack() as stack:
            processes = []
            for rank in range(count):
                command = [sys.executable, str(WORKER), str(rank), str(count), str(folder)]
                log = stack.enter_context((folder / f"log_{rank}.txt").open("w"))
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                stack.callback(process.wait)
                stack.callback(process.kill)
                processes.append(process)
            for process in processes:
                process.wait(timeout=240)
        found = [folder / f"report_{rank}.json" for rank in range(count)]
        logs = [(folder / f"log_{rank}.txt").read_text()[-3000:] for rank in range(count)]
        assert all(path.exists() for path in found), "\n".join(logs)
        return [json.loads(path.read_text()) for path in found]

    return run


def check(reports: list[dict[str, str]], name: str) -> None:
    for rank, report in enumerate(reports):
        outcome = report.get(name, f"not reached, after {', '.join(report)}")
        assert outcome == "", f"process {rank}: {outcome}"


@pytest.mark.parametrize("name", torch_processes.SCENARIOS[2])
def test_in_two_processes(name, run_processes):
    check(run_processes(2), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", torch_processes.SCENARIOS[4])
def test_in_four_processes(name, run_processes):
    check(run_processes(4), name)
