import os
import signal
import subprocess
import sys

import pytest

from celo2.runs.folder import RunFolder, RunRefused, is_alive, locked, read_owner

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
