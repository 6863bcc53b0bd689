import json
import os
import signal
import subprocess
import sys

import pytest

from celo2.runs import records
from celo2.runs.folder import RunFolder, RunRefused, is_alive, locked, read_owner
from conftest import run_python

HOLD = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from celo2.runs.folder import RunFolder, locked\n"
    "with locked(RunFolder(Path(sys.argv[1]))):\n"
    "    print('held', flush=True)\n"
    "    time.sleep(100)\n"
)


def test_second_process_is_refused_until_the_first_is_gone(tmp_path):
    folder = RunFolder(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with holder:
        assert is_alive(folder)
        with pytest.raises(RunRefused, match=f"written by process {holder.pid} on"):
            with locked(folder):
                pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert not is_alive(folder)
    with locked(folder):
        assert is_alive(folder) and read_owner(folder)["pid"] == os.getpid()


def test_asking_whether_a_run_is_alive_changes_nothing(tmp_path):
    assert not is_alive(RunFolder(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_torn_rows_are_passed_over_and_do_not_swallow_the_next(tmp_path):
    path = tmp_path / "records.jsonl"
    records.append(path, {"iteration": 1})
    path.write_bytes(path.read_bytes() + b'{"iterat')
    assert records.read(path) == [{"iteration": 1}]
    records.append(path, {"iteration": 2})
    assert records.read(path) == [{"iteration": 1}, {"iteration": 2}]
    records.cut(path, 1)
    assert path.read_text() == '{"iteration": 1}\n'


def test_disk_that_takes_half_a_row_is_an_error(tmp_path):
    path = tmp_path / "records.jsonl"
    code = (
        "import resource, sys\n"
        "from celo2.runs import records\n"
        "records.append(sys.argv[1], {'step': 1})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "records.append(sys.argv[1], {'step': 2, 'kind': 'end'})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.returncode == 1 and "OSError" in done.stderr
    assert path.stat().st_size == 20 and records.read(path) == [{"step": 1}]


def test_rows_hold_no_numbers_that_json_lacks(tmp_path):
    row = records.clean({"a": float("nan"), "b": {"c": (1.5, float("inf"))}})
    assert row == {"a": None, "b": {"c": [1.5, None]}}
    records.append(tmp_path / "r", row)
    assert json.loads((tmp_path / "r").read_text()) == row


@pytest.mark.parametrize("missing", ["fcntl", "resource"])
def test_runs_need_no_module_that_windows_lacks(missing):
    code = (
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
        "import celo2.jax, celo2.metatrain, celo2.evaluate, celo2.commands.run\n"
        "from celo2.runs.machine import peak_bytes\n"
        "print(peak_bytes()['process'] is None)\n"
    )
    assert run_python(code).strip() == str(missing == "resource")
