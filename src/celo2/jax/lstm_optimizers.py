"""VeLO and Celo as Optax transformations: an LSTM reads time and loss and steers a small MLP.

`velo` and `celo` are the optimizers. They differ in what the LSTM reads and in what it controls,
and share the rest, which follows in the order of an update: the loss, the LSTM, the MLP.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from celo2.jax.features import Features, Plane, build_features, split_first_layer
from celo2.jax.grouping import for_each, for_each_group
from celo2.jax.moments import (
    Accumulators,
    accumulate,
    as_leaves,
    as_trees,
    clip_gradient,
    init_accumulators,
    map_large,
)
from celo2.jax.optimizer import (
    ScalarOrSchedule,
    check_leaves,
    check_same_tree,
    from_view,
    leaf_paths,
    to_view,
)
from celo2.jax.update import FORMS, Weights, normalize_inputs, run_mlp
from celo2.routing import Axes, MatrixView, axes_of, published_view
from celo2.rule import RMS_EPSILON, Rule, weight_shapes
from celo2.rulefile import as_velo_rule
from celo2.velo import FRACTIONS, LOSS_MEANS, MLP, RANKS, STATISTICS, Optimizer, VeloConfig

# The loss.
SHORTEST_MEAN = 10.0  # steps, of the fastest running mean
NO_MINIMUM = 999999999999.0
SPIKE = 2.0  # a loss counts as at most so many times the largest running mean
MEAN_FLOOR = 1e-8
QUIET_UPDATES = 2  # the first ones, in which the features of the loss are zero

# The LSTM and its inputs.
FRACTION_SCALE = 10.0
SCALE_FLOOR = 1e-9
LOG_SCALE, LOG_FLOOR, LOG_LIMIT, LOG_FACTOR = 10.0, 1e-8, 5.0, 0.5
FORGET_BIAS = 1.0
CELO_SCALE = 0.1

# The MLP and the step.
INVERSE_RMS_EPSILON = 1e-6
INPUT_EPSILON = 1e-5
PARAMETER_EPSILON = 1e-9
STEP = 1e-3  # the published factor on every step


class LstmState(NamedTuple):
    """The state of VeLO or Celo, float32 except for the count.

    `rows` and `cols` are in the shape of the tensor's matrix view, with length 1 along the axis
    they were reduced over.
    """

    count: Array
    loss_means: Array
    loss_minima: Array
    hidden: Array  # (tensors, width) in the order of leaves; one row in Celo
    cell: Array
    momentum: tuple[optax.Params, ...]  # one tree per decay, shaped and sharded like the params
    rms: optax.Params
    rows: optax.Params  # factored second moments, (decays, …); a vector keeps its whole ones here
    cols: optax.Params


def velo(
    num_steps: int,
    *,
    rule: Rule | str | Path,
    learning_rate: ScalarOrSchedule = STEP,
    weight_decay: float | Array = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """VeLO (Metz et al. 2022): an LSTM sees every tensor and mixes an MLP for each.

    Its update needs the loss: `tx.update(grads, state, params, value=loss)`. The LSTM looks at all
    tensors together: masking or partitioning parameters changes the update of the others.

    Args:
        num_steps: how many updates the run will have; VeLO plans for that number.
        rule: a rule for VeLO, its file or an hf:// address; `celo2 convert` makes one of the
            published checkpoints.
        learning_rate: the factor on every step, or a schedule; 0.001 is VeLO as published, which
            has no other learning rate and needs no tuning.
        weight_decay: as the published code has it, coupled: times the parameters it is added to
            the gradient, and times their sum of squares to the loss.

    Example:
        >>> from celo2.jax import velo
        >>> tx = velo(1000, rule="velo.safetensors")  # doctest: +SKIP
        >>> state = tx.init(params)  # doctest: +SKIP
        >>> updates, state = tx.update(grads, state, params, value=loss)  # doctest: +SKIP
    """
    return _steered("velo", num_steps, rule, learning_rate, weight_decay)


def celo(
    num_steps: int,
    *,
    rule: Rule | str | Path,
    learning_rate: ScalarOrSchedule = STEP,
    weight_decay: float | Array = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Celo (Moudgil et al. 2025): an LSTM sees time and loss, and scales the steps of one MLP.

    Its update needs the loss: `tx.update(grads, state, params, value=loss)`.

    Args:
        num_steps: how many updates the run will have; Celo plans for that number.
        rule: a rule for Celo, its file or an hf:// address; `celo2 convert` makes one of the
            published checkpoint.
        learning_rate: the factor on every step, or a schedule; 0.001 is Celo as published, which
            has no other learning rate.
        weight_decay: coupled, as for `velo`.

    Example:
        >>> from celo2.jax import celo
        >>> tx = celo(1000, rule="celo.safetensors")  # doctest: +SKIP
        >>> state = tx.init(params)  # doctest: +SKIP
        >>> updates, state = tx.update(grads, state, params, value=loss)  # doctest: +SKIP
    """
    return _steered("celo", num_steps, rule, learning_rate, weight_decay)


def _steered(
    optimizer: Optimizer,
    num_steps: int,
    rule: Rule | str | Path,
    learning_rate: ScalarOrSchedule,
    weight_decay: float | Array,
) -> optax.GradientTransformationExtraArgs:
    if isinstance(num_steps, bool) or not isinstance(num_steps, (int, np.integer)) or num_steps < 1:
        raise ValueError(
            f"num_steps={num_steps!r} must be the planned number of updates, an integer from 1 up."
        )
    loaded = as_velo_rule(rule, optimizer)
    config = loaded.config
    weights = {name: jnp.asarray(w, jnp.float32) for name, w in loaded.weights.items()}
    times = mean_times(config.loss_horizon or int(num_steps))

    def init(params: optax.Params) -> LstmState:
        check_leaves(params)
        _check_filled(params)
        leaves, treedef = jax.tree.flatten(params)
        tensors = len(leaves) if optimizer == "velo" else 1
        hidden, cell = (
            jnp.repeat(weights[name], tensors, 0) for name in ("lstm.hidden", "lstm.cell")
        )
        return LstmState(
            jnp.zeros([], jnp.int32),
            jnp.zeros(LOSS_MEANS, jnp.float32),
            jnp.full(LOSS_MEANS, NO_MINIMUM, jnp.float32),
            hidden,
            cell,
            *as_trees(
                Accumulators, treedef, list(map(_init_tensor, leaves)), len(MLP.momentum_decays)
            ),
        )

    def update(updates, state, params=None, *, value=None, **extra_args):
        del extra_args
        loss = _check_arguments(optimizer, updates, state, params, value)
        grads, treedef = jax.tree.flatten(updates)
        memory = as_leaves(Accumulators, (state.momentum, state.rms, state.rows, state.cols))
        tensors = [
            _view(*tensor) for tensor in zip(grads, jax.tree.leaves(params), memory, strict=True)
        ]
        if not (isinstance(weight_decay, (int, float)) and weight_decay == 0):
            loss, tensors = _decay_coupled(weight_decay, loss, tensors)

        means, minima, of_loss = read_loss(
            times, state.count, state.loss_means, state.loss_minima, loss
        )
        progress = jnp.concatenate([time_features(state.count, num_steps), of_loss])
        inputs = READ[optimizer](progress, tensors)
        hidden, cell = lstm_step(weights, inputs, state.hidden, state.cell)
        mlps, scales = CONTROL[optimizer](config, weights, hidden, len(tensors))
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate

        jobs, stored = [], []
        for i, tensor in enumerate(tensors):
            new = _accumulate(tensor.axes, tensor.grad, tensor.memory)
            mlp = {name: weight[i] for name, weight in mlps.items()}
            jobs.append((tensor.axes, (mlp, rate * scales[i], tensor.param, tensor.grad, new)))
            stored.append(map_large(lambda x, t=tensor: from_view(x, t.view, t.stored), new))
        roles = [re.sub(r"\d+", "", path) for path in leaf_paths(params)]
        steps = for_each_group(
            lambda axes, group: for_each(functools.partial(tensor_step, axes), group), jobs, roles
        )
        moves = [
            -from_view(step, tensor.view, tensor.stored).astype(grad.dtype)
            for step, tensor, grad in zip(steps, tensors, grads, strict=True)
        ]
        trees = as_trees(Accumulators, treedef, stored, len(MLP.momentum_decays))
        count = jnp.asarray(optax.safe_increment(state.count))
        return treedef.unflatten(moves), LstmState(count, means, minima, hidden, cell, *trees)

    return optax.GradientTransformationExtraArgs(init, update)


class Tensor(NamedTuple):
    """One tensor of a step, in its matrix view and float32; axes are as they are in the tree."""

    view: MatrixView
    stored: tuple[int, ...]  # its shape outside
    axes: Axes
    param: Array
    grad: Array
    memory: Accumulators  # without this gradient


def _init_tensor(param: Array) -> Accumulators:
    # Zeros, since the parameter may be a shape only.
    view, zeros = published_view(param.ndim), jnp.zeros_like(param, jnp.float32)
    viewed = to_view(zeros, view)
    found = init_accumulators(MLP, axes_of(view, viewed.shape), viewed)
    return map_large(lambda _: jnp.zeros_like(zeros), found)


def _view(grad: Array, param: Array, memory: Accumulators) -> Tensor:
    view = published_view(grad.ndim)
    seen_param, seen_grad = (to_view(x.astype(jnp.float32), view) for x in (param, grad))
    memory = map_large(lambda x: to_view(x, view), memory)
    axes = axes_of(view, seen_grad.shape)
    return Tensor(view, grad.shape, axes, seen_param, seen_grad, memory)


@functools.partial(jax.jit, static_argnums=0)  # one trace for each shape
def _accumulate(axes: Axes, grad: Array, memory: Accumulators) -> Accumulators:
    return accumulate(MLP, axes, clip_gradient(grad), memory)


def _decay_coupled(
    weight_decay: float | Array, loss: Array, tensors: list[Tensor]
) -> tuple[Array, list[Tensor]]:
    squares = [jnp.sum(jnp.square(tensor.param)) for tensor in tensors]
    decayed = [t._replace(grad=t.grad + weight_decay * t.param) for t in tensors]
    return loss + weight_decay * sum(squares, jnp.zeros([])), decayed


def _check_filled(params: optax.Params) -> None:
    for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True):
        if 0 in leaf.shape:
            raise ValueError(
                f"{path} has shape {leaf.shape}, no element: leave it out with optax.masked."
            )


def _check_arguments(
    optimizer: Optimizer, updates: Any, state: LstmState, params: Any, value: Any
) -> Array:
    """The loss as float32, after checking all arguments of an update."""
    call = "call tx.update(grads, state, params, value=loss)."
    if params is None:
        raise ValueError(f"{optimizer} needs the current parameters: {call}")
    if value is None:
        raise ValueError(f"{optimizer} needs the loss of this step as `value`: {call}")
    if jnp.shape(value) != ():
        raise ValueError(
            f"value has shape {jnp.shape(value)}: {optimizer} needs the mean loss, a scalar."
        )
    check_same_tree(updates, params)
    check_same_tree(state.rms, params, "optimizer state")
    return jnp.asarray(value, jnp.float32)


def mean_times(horizon: int) -> Array:
    """The time constant of each running mean of the loss in updates, from 10 to the horizon."""
    return jnp.asarray(np.geomspace(SHORTEST_MEAN, horizon, LOSS_MEANS), jnp.float32)


def _weight_of(updates: Array | float, times: Array) -> Array:
    """The weight of the latest updates in a running mean, 1 - decay^updates.

    The published code computes just that; but with a long horizon decay is close to 1, and the
    difference has few correct digits in float32.
    """
    return -jnp.expm1(-updates / times)


def read_loss(
    times: Array, count: Array, means: Array, minima: Array, loss: Array
) -> tuple[Array, Array, Array]:
    """The running means of the loss and the least values they had, after one more loss.

    Then the features: how far each mean is above its minimum, beside the next slower mean, from
    -1 to 1. They are zero in the first two updates.
    """
    seen = _weight_of((count + 1).astype(jnp.float32), times)
    # One update too many for these means; the weights are used to it.
    largest = jnp.where(count == 0, loss, jnp.max(means / seen))
    loss = jnp.minimum(SPIKE * jnp.abs(largest), loss)
    fresh = _weight_of(1.0, times)
    means = (1.0 - fresh) * means + fresh * loss
    # Computed once, so that a mean at its minimum is exactly zero above it.
    level = lax.optimization_barrier(means / seen)
    minima = jnp.minimum(minima, level)
    above = level[1:] - minima[:-1]
    ratio = (level[:-1] - minima[:-1]) / jnp.maximum(MEAN_FLOOR, above)
    features = jnp.where(count < QUIET_UPDATES, 0.0, jnp.clip(ratio - 1.0, -1.0, 1.0))
    return means, minima, features


def time_features(count: Array, num_steps: int) -> Array:
    """The position of an update in the run, relative to several fractions of it."""
    fraction = count.astype(jnp.float32) / num_steps
    return jnp.tanh(FRACTION_SCALE * (fraction - jnp.asarray(FRACTIONS, jnp.float32)))


def lstm_step(weights: Weights, inputs: Array, hidden: Array, cell: Array) -> tuple[Array, Array]:
    """The LSTM's new state from its inputs, (tensors, features), of which each sees the largest."""
    largest = jnp.max(jax.nn.relu(_layer(weights, "linear_1", inputs)), 0, keepdims=True)
    mixed = _layer(weights, "linear_2", inputs) + largest
    gates = _layer(weights, "lstm", jnp.concatenate([mixed, hidden], 1))
    enter, content, forget, leave = jnp.split(gates, 4, 1)
    cell = jax.nn.sigmoid(forget + FORGET_BIAS) * cell + jax.nn.sigmoid(enter) * jnp.tanh(content)
    return jax.nn.sigmoid(leave) * jnp.tanh(cell), cell


def _layer(weights: Weights, name: str, x: Array) -> Array:
    # Accelerators would round the factors to fewer bits.
    return jnp.matmul(x, weights[f"{name}.w"], precision=lax.Precision.HIGHEST) + weights[
        f"{name}.b"
    ].reshape(1, -1)


def _read_tensors(progress: Array, tensors: list[Tensor]) -> Array:
    """VeLO's inputs: a row for each tensor."""
    rows = [jnp.concatenate([progress, *tensor_statistics(tensor)]) for tensor in tensors]
    return jnp.stack(rows) if rows else jnp.zeros((0, progress.size + STATISTICS))


def tensor_statistics(tensor: Tensor) -> list[Array]:
    """The inputs of VeLO's LSTM for a tensor: sizes of its accumulators, and its rank."""
    momenta, rms = tensor.memory.momentum, tensor.memory.rms
    # Multiplied in last, so that nothing as large as the tensor is kept for several sums.
    scale = lax.rsqrt(jnp.maximum(SCALE_FLOOR, jnp.mean(jnp.square(tensor.param))))
    means = [jnp.mean(m) for m in momenta]
    of_momenta = [jnp.mean(jnp.square(m - mean)) for m, mean in zip(momenta, means, strict=True)]
    # From the means of the momenta, not from its own: the published weights are used to it.
    of_rms = [jnp.mean(jnp.square(rms - mean)) for mean in means]
    rank = sum(length > 1 for length in tensor.stored)
    return [
        _log_size(scale * jnp.mean(rms))[None],
        jax.nn.one_hot(rank, RANKS, dtype=jnp.float32),
        _log_size(jnp.square(scale) * jnp.stack(of_momenta)),
        _log_size(jnp.square(scale) * jnp.stack(of_rms)),
    ]


def _log_size(x: Array) -> Array:
    size = jnp.log(LOG_FLOOR + jnp.abs(LOG_SCALE * x))
    return LOG_FACTOR * jnp.clip(size, -LOG_LIMIT, LOG_LIMIT)


def _mix_mlps(
    config: VeloConfig, weights: Weights, hidden: Array, tensors: int
) -> tuple[dict[str, Array], Array]:
    """VeLO's control: an MLP for each tensor, and a factor that may be negative."""
    del tensors
    controls = _layer(weights, "controls", hidden) * (config.bank_scale / config.banks)
    mix = functools.partial(jnp.tensordot, controls, axes=1, precision=lax.Precision.HIGHEST)
    return {name: mix(weights[name]) for name in weight_shapes(MLP)}, _step_size(weights, hidden)


def _scale_mlp(
    config: VeloConfig, weights: Weights, hidden: Array, tensors: int
) -> tuple[dict[str, Array], Array]:
    """Celo's control: the one MLP and one positive factor, for all tensors."""
    del config
    mlps = {name: jnp.repeat(weights[name], tensors, 0) for name in weight_shapes(MLP)}
    return mlps, jnp.repeat(CELO_SCALE * jnp.exp(_step_size(weights, hidden)), tensors)


def _step_size(weights: Weights, hidden: Array) -> Array:
    return _layer(weights, "step_size", hidden)[:, 0]


# The LSTM's inputs, which for Celo are one row for all tensors, and what its output controls.
READ: dict[str, Callable[[Array, list[Tensor]], Array]] = {
    "velo": _read_tensors,
    "celo": lambda progress, tensors: progress[None],
}
CONTROL: dict[str, Callable[..., tuple[dict[str, Array], Array]]] = {
    "velo": _mix_mlps,
    "celo": _scale_mlp,
}


def tensor_step(axes: Axes, tensor: tuple[Weights, Array, Array, Array, Accumulators]) -> Array:
    """The step of one viewed tensor from its MLP, its factor, and accumulators that include the
    gradient.
    """
    mlp, scale, param, grad, memory = tensor
    grad = clip_gradient(grad)  # again, rather than kept since it was taken in
    first_layer = split_first_layer(MLP, mlp["w0"], True) if axes.matrix else [mlp["w0"]]
    whole = tuple(range(-param.ndim, 0))
    normalize = functools.partial(normalize_inputs, axes=whole, epsilon=INPUT_EPSILON)
    build = functools.partial(_build_features, axes)
    learned = FORMS[MLP.form](*run_mlp(mlp, first_layer, normalize, build, (param, grad, memory)))
    size = jnp.sqrt(jnp.mean(jnp.square(param)) + PARAMETER_EPSILON)
    return learned * (scale * size)


def _build_features(axes: Axes, param: Array, grad: Array, memory: Accumulators) -> Features:
    """Celo2's features; vectors also get those of matrices, from unfactored second moments."""
    features = build_features(axes, param, grad, memory, rms_epsilon=INVERSE_RMS_EPSILON)
    if axes.matrix:
        return features
    inverse = lax.rsqrt(memory.rows + RMS_EPSILON)
    momenta = (m * lax.rsqrt(d) for m, d in zip(memory.momentum, memory.rows, strict=True))
    further = (*memory.rows, *memory.rows, *inverse, *inverse, *momenta)
    return Features([*features.planes, *map(Plane, further)], ())
