"""What a run ran on: versions of the libraries, and the hardware."""

import importlib.metadata
import os
import platform
import sys
from typing import Any

import jax

LIBRARIES = ("jax", "jaxlib", "optax", "numpy")


def version(library: str = "celo2") -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path, never installed
        return "0+unknown"


def versions() -> dict[str, str]:
    """Of celo2, of Python and of the libraries that decide a run's numbers."""
    return {name: version(name) for name in ("celo2", *LIBRARIES)} | {
        "python": platform.python_version()
    }


def hardware() -> dict[str, Any]:
    """The devices and the cores this process may use; nothing that names the machine."""
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


def peak_bytes() -> dict[str, int | None]:
    """The most memory this process has held so far: on its first device (if told), and of its own.

    A process that has made several runs gives the largest of them.
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
