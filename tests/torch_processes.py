"""What each process does for `torch/test_optimizer_distributed.py`, started as

    python torch_processes.py RANK PROCESSES FOLDER

with a folder they share. Writes a JSON file: the name of each scenario → "" or its traceback.
"""

import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import torch_tensor_scenarios  # noqa: F401 -- they enter themselves into SCENARIOS
import torch_training_scenarios  # noqa: F401
from torch_world import SCENARIOS, Here


def main() -> None:
    rank, processes, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="The state was saved with another rule")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), processes),
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=60),
    )
    here, report = Here(rank, processes, folder), {}
    name = ""
    try:
        for name in sys.argv[4:] or SCENARIOS[processes]:
            SCENARIOS[processes][name](here)
            report[name] = ""
    except Exception:
        # The others may be waiting for this process: whatever comes next would hang.
        report[name] = traceback.format_exc()
        raise
    finally:
        (folder / f"report_{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
