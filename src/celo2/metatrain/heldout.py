"""Held-out tries during a meta-training run, by another process of low priority.

The folder `heldout` of the run holds `rule.safetensors`, the rule of the latest try, the output of
the command (`result.json`, `log.txt`) and any other files that it writes there.
"""

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celo2 import rulefile
from celo2.rule import Rule
from celo2.runs.folder import RunFolder, is_alive

NICE = 5  # added to the process's niceness
SECONDS_TO_STOP = 10.0


@dataclass
class Tries:
    """The tries of one run, one at a time.

    Args:
        folder: their folder.
        command: is given the path of a rule file, and prints a JSON object whose `score` is the
            lower, the better.
        every: iterations between tries.
        begun: iteration of the newest try.
        process: the try that is running.
    """

    folder: Path
    command: Sequence[str]
    every: int
    begun: int = 0
    process: subprocess.Popen | None = None

    @property
    def rule_file(self) -> Path:
        """The rule of the latest try."""
        return self.folder / "rule.safetensors"

    def is_due(self, done: int, total: int) -> bool:
        """Whether the rule of iteration `done` is to be tried: at multiples, and at the end."""
        at_end = done == total > self.every and self.begun < done
        return done // self.every > self.begun // self.every or at_end

    def is_running(self) -> bool:
        """Whether a try is running, which may be one that a killed run started."""
        ours = self.process is not None and self.process.poll() is None
        return ours or is_alive(RunFolder(self.folder))


def begin_try(tries: Tries, rule: Rule) -> None:
    """Starts to try a rule, whose origin has its iteration."""
    tries.folder.mkdir(exist_ok=True)
    rulefile.save(rule, tries.rule_file)
    _start_process(tries, rule)


def resume_try(tries: Tries, recorded: int, done: int) -> None:
    """Restarts the newest try if it was interrupted, that is if it has no row.

    `recorded` is the iteration of the newest try that has a row, `done` that of the run.
    """
    tries.begun = recorded
    if not tries.rule_file.exists() or tries.is_running():
        return
    rule = rulefile.load(tries.rule_file)
    if recorded < rule.origin["iterations"] <= done:
        _start_process(tries, rule)


def end_try(tries: Tries) -> dict[str, Any] | None:
    """The result of a try that has ended since the last call, None without one.

    Raises a ValueError if the try failed.
    """
    if tries.process is None or tries.process.poll() is None:
        return None
    status, tries.process = tries.process.returncode, None
    try:
        result = json.loads((tries.folder / "result.json").read_text("utf-8"))
        if status == 0 and isinstance(result, dict):
            return result
        cause = f"exit status {status}"
    except ValueError:
        lines = (tries.folder / "log.txt").read_text("utf-8", "replace").strip().splitlines()
        cause = lines[-1] if lines else f"exit status {status}, and no JSON"
    raise ValueError(f"the held-out try of iteration {tries.begun} failed: {cause[:300]}")


def stop_tries(tries: Tries) -> None:
    """Terminates the running try; it is restarted when the run is resumed."""
    if tries.process is None:
        return
    tries.process.terminate()
    try:
        tries.process.wait(SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
        tries.process.kill()
        tries.process.wait()


def _start_process(tries: Tries, rule: Rule) -> None:
    # The run uses the accelerator and nearly all of its memory.
    environment = dict(os.environ) | {"JAX_PLATFORMS": "cpu"}
    result, log = tries.folder / "result.json", tries.folder / "log.txt"
    with result.open("wb") as out, log.open("wb") as err:
        # A session of its own: Ctrl-C reaches the run, which passes it on.
        tries.process = subprocess.Popen(
            [*tries.command, str(tries.rule_file)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    tries.begun = rule.origin["iterations"]
    if hasattr(os, "setpriority"):  # which Windows has not
        priority = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, tries.process.pid, min(priority + NICE, 19))


def trained_on(problems: Iterable[str], data: Iterable[str]) -> list[str]:
    """The held-out problems whose images the rule is also trained on.

    >>> trained_on(["vit-svhn", "text-tiny"], ["mnist", "convnet/svhn"])
    ['vit-svhn']
    """
    images = {name.rpartition("/")[2] for name in data}
    return [problem for problem in problems if images & set(problem.split("-"))]
