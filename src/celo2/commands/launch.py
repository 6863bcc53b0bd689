"""How a command becomes one of several processes, and gets its devices."""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from celo2.runs.processes import DATA, MODEL, make_mesh, parse_mesh

LOST = 4  # exit status
ADDRESS, PORT, RANK, COUNT = TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Launch:
    """The processes and devices of a run.

    Args:
        devices: CPU devices of this process; the command's own number by default.
        distributed: be one of several processes; their address, number and count are found in the
            environment (Slurm, Open MPI, TPU pods, GKE, or MASTER_ADDR, MASTER_PORT, RANK and
            WORLD_SIZE) unless given below.
        coordinator: host:port of process 0.
        process_id: number of this process.
        process_count: of all processes.
    """

    devices: int | None = None
    distributed: bool = False
    coordinator: str | None = None
    process_id: int | None = None
    process_count: int | None = None

    @property
    def several(self) -> bool:
        """Whether there are other processes."""
        return self.distributed or self.coordinator is not None


ALONE = Launch()


def start_devices(launch: Launch, default: int = 1) -> None:
    """Makes the CPU devices, `default` of them unless told, and joins the other processes.

    Must come before anything else is asked of JAX.
    """
    if launch.devices is not None and launch.devices < 1:
        raise ValueError(f"devices={launch.devices} must be at least 1.")
    devices = launch.devices or default
    if devices > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", devices)
    if launch.several:
        found = _from_environment(launch)
        jax.distributed.initialize(found.coordinator, found.process_count, found.process_id)


def start_mesh(mesh: str | None, launch: Launch) -> Mesh | None:
    """Starts the devices and gives the mesh over them; None for a single device."""
    sizes = parse_mesh(mesh) if mesh else None
    needed = math.prod(sizes.values()) if sizes else 1
    start_devices(launch, max(1, needed // (launch.process_count or 1)))
    if sizes is None and jax.process_count() == 1:
        return None
    return make_mesh(sizes or {DATA: jax.device_count(), MODEL: 1})


@contextmanager
def ending_together() -> Iterator[None]:
    """Ends this process with a message when the others of its run can no longer be reached.

    At once: an orderly end would wait for them.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        text = f"another process of this run was lost, or a device failed: {cause}"
        print(f"celo2: {text}\ncelo2: continue with --resume", file=sys.stderr, flush=True)
        os._exit(LOST)


def _from_environment(launch: Launch) -> Launch:
    """The launch with what torchrun and its like have set, where nothing else was said.

    JAX finds Slurm, Open MPI, TPU pods and Kubernetes by itself.
    """
    given = (launch.coordinator, launch.process_id, launch.process_count)
    if any(value is not None for value in given) or not set(TORCHRUN) <= os.environ.keys():
        return launch
    return Launch(
        launch.devices,
        True,
        f"{os.environ[ADDRESS]}:{os.environ[PORT]}",
        int(os.environ[RANK]),
        int(os.environ[COUNT]),
    )
