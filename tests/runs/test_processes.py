import signal
import subprocess
import sys

import pytest

from conftest import run_python


def test_second_signal_ends_even_compiled_code_at_once():
    code = (
        "import time\n"
        "from celo2.runs.processes import stop_on_signal\n"
        "with stop_on_signal(lambda text: print(text, flush=True)) as asked:\n"
        "    asked.leave = lambda: print('leaving', flush=True)\n"
        "    print('ready', flush=True)\n"
        "    import threading; threading.Lock().acquire() or None\n"
        "    lock = threading.Lock(); lock.acquire(); lock.acquire()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert "saving first" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130 and process.stdout.readline() == "leaving\n"


@pytest.mark.parametrize("missing", ["fcntl", "resource"])
def test_runs_need_no_module_that_windows_lacks(missing):
    code = (
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
        "import celo2.jax, celo2.metatrain, celo2.evaluate, celo2.commands.evaluate\n"
        "from celo2.runs.processes import peak_bytes\n"
        "print(peak_bytes()['process'] is None)\n"
    )
    assert run_python(code).strip() == str(missing == "resource")
