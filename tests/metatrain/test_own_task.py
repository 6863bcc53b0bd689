import subprocess
import sys

import pytest

import celo2
from conftest import REPOSITORY


@pytest.mark.slow
def test_example_makes_a_rule_and_uses_it(tmp_path):
    example = REPOSITORY / "examples" / "own_task.py"
    command = [sys.executable, str(example), "--out", str(tmp_path / "run"), "--iterations", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "iteration    20" in done.stdout and "own rule" in done.stdout
    assert celo2.load(tmp_path / "run" / "rule.safetensors").origin["iterations"] == 20
