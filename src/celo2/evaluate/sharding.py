"""Where a run's arrays lie on a mesh: FSDP along `data`, tensor parallelism along `model`.

Every matrix is cut along both axes of the mesh where its sides divide. The model axis follows the
transformer's names (Megatron's layout: one exchange after attention, one after the MLP); the data
axis takes the side that Newton–Schulz exchanges least for, see docs/sharding.md.
"""

from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from celo2.jax.optimizer import leaf_paths
from celo2.runs.mesh import DATA, MODEL

# Layers whose outputs, or inputs, are spread over the model axis.
BY_COLUMNS = ("q", "k", "v", "up", "lm_head")
BY_ROWS = ("o", "down", "embed")
SMALLEST = 2  # axes of a tensor that is cut; smaller ones are on every device


def parameter_specs(params: Any, mesh: Mesh) -> Any:
    """A PartitionSpec for each parameter."""
    leaves, structure = jax.tree.flatten(params)
    specs = [
        leaf_spec(path, leaf.shape, dict(mesh.shape))
        for path, leaf in zip(leaf_paths(params), leaves, strict=True)
    ]
    return structure.unflatten(specs)


def leaf_spec(path: str, shape: tuple[int, ...], sizes: dict[str, int]) -> P:
    """How one parameter is cut, by its path and shape.

    >>> tuple(leaf_spec("block_0/mlp/up/kernel", (64, 256), {"data": 4, "model": 2}))
    ('data', 'model')
    """
    if len(shape) < SMALLEST:
        return P()
    axes: list[str | None] = [None] * len(shape)
    layer = path.split("/")[-2:][0]
    side = len(shape) - 1 if layer in BY_COLUMNS else len(shape) - 2
    if layer in BY_COLUMNS + BY_ROWS and _divides(sizes[MODEL], shape[side]):
        axes[side] = MODEL
    # The longer of the last two sides, the columns of a square: what is left of them.
    for side in sorted((len(shape) - 1, len(shape) - 2), key=lambda i: -shape[i]):
        if axes[side] is None and _divides(sizes[DATA], shape[side]):
            axes[side] = DATA
            break
    return P(*axes)


def optimizer_specs(tx: optax.GradientTransformation, params: Any, specs: Any, mesh: Mesh) -> Any:
    """PartitionSpecs of the optimizer's state for parameters of these shapes and specs.

    Found by tracing `init` with shardings as part of the types, so it holds for any optimizer.
    """
    explicit = AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names)
    )

    def typed(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(explicit, spec))

    with jax.sharding.use_abstract_mesh(explicit):
        found = jax.eval_shape(tx.init, jax.tree.map(typed, params, specs))
    return jax.tree.map(lambda x: x.sharding.spec if x.sharding else P(), found)


def on_mesh(abstract: Any, specs: Any, mesh: Mesh) -> Any:
    """The shapes with their places."""
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        abstract,
        specs,
    )


def spread_batch(batch: Any, mesh: Mesh) -> Any:
    """The batch with its examples, which come first, spread over the data axis."""
    return jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(DATA))), batch
    )


def check_batch(batch: int | None, accumulate: int, mesh: Mesh) -> None:
    """Raises a ValueError unless every part of a batch can be shared by the data axis."""
    if batch is not None and batch % (accumulate * mesh.shape[DATA]):
        raise ValueError(
            f"batch={batch} in {accumulate} parts cannot be shared by {mesh.shape[DATA]} devices "
            f"along {DATA}: choose a multiple of {accumulate * mesh.shape[DATA]}."
        )


def _divides(size: int, length: int) -> bool:
    return size > 1 and length % size == 0
