"""The processes and devices of a run: how they start, what they agree on, how they are stopped."""

import importlib.metadata
import math
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from celo2.runs.folder import RunRefused

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)


def parse_mesh(text: str) -> dict[str, int]:
    """The axis sizes in a mesh's description; an axis that is not named has size 1.

    >>> parse_mesh("data=4,model=2")
    {'data': 4, 'model': 2}
    """
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh={text!r} is not of the form data=4,model=2: {part.strip()!r} names no axis "
                f"of {', '.join(AXES)} with a positive size."
            )
        sizes[name] = int(size)
    return sizes


def make_mesh(sizes: Mapping[str, int] | None = None) -> Mesh:
    """A mesh of that shape over all devices, in the order that `jax.make_mesh` chooses.

    By default all devices are along `data`.
    """
    sizes = {DATA: jax.device_count()} if sizes is None else sizes
    asked, there = math.prod(sizes.values()), jax.device_count()
    if asked != there:
        shape = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"mesh={shape!r} has {asked} places, and there are {there} devices: choose sizes whose "
            f"product is {there}, or set the number of CPU devices with --devices."
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


T = TypeVar("T")


def is_primary() -> bool:
    """Whether this is the process that writes records and rules."""
    return jax.process_index() == 0


def some_process(*flags: bool) -> list[bool]:
    """For each flag, whether it is true in any process; the same answer in all of them."""
    return multihost_utils.process_allgather(np.array(flags)).any(axis=0).tolist()


def same_everywhere(number: int) -> int:
    """The number that process 0 has."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def in_primary(action: Callable[[], T]) -> T | None:
    """What `action` returns in process 0; None in the others. If it fails, all processes fail."""
    result, error = None, None
    if is_primary():
        try:
            result = action()
        except Exception as caught:
            error = caught
    if some_process(error is not None)[0]:
        raise error or RunRefused("Process 0 could not start; see its message.")
    return result


# Exit statuses beside 0, 1 and 2.
DIVERGED = 3
LOST = 4  # another process
STOPPED = 128 + signal.SIGTERM  # of a process that another one's signal stopped
ADDRESS, PORT, RANK, COUNT = TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Launch:
    """The processes and devices of a run.

    Args:
        devices: number of CPU devices of this process; None: the command's own choice.
        distributed: join the other processes of the run, which are found through Slurm, Open MPI,
            TPU pods, GKE, or MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; the next three options
            replace what is found.
        coordinator: address of process 0, host:port.
        process_id: number of this process, counted from 0.
        process_count: number of processes.
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
    """Sets the number of CPU devices, `default` unless given, and connects to other processes.

    Must be called before JAX is used.
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
    """Starts the devices and returns the mesh over them; None for a single device."""
    sizes = parse_mesh(mesh) if mesh else None
    needed = math.prod(sizes.values()) if sizes else 1
    start_devices(launch, max(1, needed // (launch.process_count or 1)))
    if sizes is None and jax.process_count() == 1:
        return None
    return make_mesh(sizes or {DATA: jax.device_count(), MODEL: 1})


@contextmanager
def exit_if_lost() -> Iterator[None]:
    """Ends this process with a message when another process of its run was lost.

    It exits at once: an orderly shutdown would wait for the lost process.
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
    """The launch with torchrun's environment variables, unless it names processes itself.

    JAX detects Slurm, Open MPI, TPU pods and Kubernetes itself.
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


STOP = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a signal has asked to stop, and which one."""

    signal: int | None = None
    leave: Callable[[], None] = staticmethod(lambda: None)  # called before a second one exits

    def __call__(self) -> bool:
        return self.signal is not None

    @property
    def status(self) -> int:
        """The exit status of a process ended by that signal: 130, 143, or 0 without one."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def stop_on_signal(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Turns the first SIGINT or SIGTERM into a request; a second one ends the process at once.

    A thread reads them from a socket: Python's own handlers wait until compiled code returns,
    which can take a minute while it compiles.
    """
    asked = StopRequest()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen():
        while number := reader.recv(1):
            if number[0] not in STOP:
                continue
            if asked.signal is not None:
                asked.leave()
                os._exit(128 + number[0])
            asked.signal = number[0]
            say("stopping: saving first, again to exit at once")

    thread = threading.Thread(target=listen, daemon=True)
    before = {number: signal.signal(number, lambda *_: None) for number in STOP}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield asked
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()
        thread.join(timeout=1)
        reader.close()


LIBRARIES = ("jax", "jaxlib", "optax", "numpy")


def version(library: str = "celo2") -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path, never installed
        return "0+unknown"


def versions() -> dict[str, str]:
    """The versions of celo2, of Python and of the libraries that a run's numbers depend on."""
    return {name: version(name) for name in ("celo2", *LIBRARIES)} | {
        "python": platform.python_version()
    }


def hardware() -> dict[str, Any]:
    """The devices and cores that this process may use; nothing that identifies the machine."""
    return {
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cores": cores(),
        "machine": platform.machine(),
    }


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` up to `limit`."""
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def peak_bytes() -> dict[str, int | None]:
    """The most memory used so far: on the first device, if known, and by this process.

    Where a process has made several runs, it is the most that any of them used.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    return {"device": stats.get("peak_bytes_in_use"), "process": _peak_of_process()}


def _peak_of_process() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
