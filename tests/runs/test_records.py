import json
import subprocess
import sys

from celo2.runs import records


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
