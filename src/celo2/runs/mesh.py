"""Meshes over all devices of all processes."""

import math
from collections.abc import Mapping

import jax
from jax.sharding import AxisType, Mesh

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes in a mesh's description; an axis that is not named has size 1.

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


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """The mesh of that shape over all devices, in the order that JAX finds fastest."""
    asked, there = math.prod(sizes.values()), jax.device_count()
    if asked != there:
        shape = ",".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"mesh={shape!r} has {asked} places, and there are {there} devices: choose sizes whose "
            f"product is {there}, or set the number of CPU devices with --devices."
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
