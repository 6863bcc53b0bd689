"""The rule as an Optax transformation, and the optimizers made of it.

`scale_by_celo2` is the rule alone. `celo2` and `celo2_base` are complete optimizers: the rule on
some tensors, AdamW on the others. Helpers for parameter trees follow at the end.
"""

import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from celo2.jax.grouping import (
    for_each,
    for_each_group,
    is_worth_redistributing,
    loop,
    mesh_of,
    redistributed,
    unstack,
)
from celo2.jax.moments import (
    Moments,
    as_leaves,
    as_trees,
    clip_gradient,
    init_moments,
    map_large,
    update_moments,
)
from celo2.jax.update import (
    Kernel,
    Weights,
    finish_update,
    learned_update,
    overshoot_of,
    tensor_update,
)
from celo2.routing import (
    Axes,
    Explanation,
    Line,
    MatrixView,
    Overrides,
    Route,
    Scale,
    axes_of,
    check_overrides,
    route,
    scale_factor,
)
from celo2.rule import ADAM_GRADIENT_LIMIT, ADAM_MULTIPLIER, Rule, RuleConfig, check_choice
from celo2.rulefile import as_rule

ScalarOrSchedule = float | Array | optax.Schedule
Mask = Any | Callable[[optax.Params], Any]


class Celo2State(NamedTuple):
    """The rule's memory: trees of the parameters' structure, all float32 but the counts.

    Everything but `momentum` and `rms` is in the shape of the tensor's matrix view, with length 1
    along the axes it was reduced over.
    """

    count: Array
    momentum: tuple[optax.Params, ...]  # one tree per decay, shaped and sharded like the params
    rms: optax.Params
    rows: optax.Params  # factored second moments, (decays, …); a vector keeps its whole ones here
    cols: optax.Params
    running_rms: optax.Params  # mean RMS of the updates so far, for the rolling norms
    moves: optax.Params  # steps in which each matrix moved
    skipped: optax.Params  # steps in which each matrix was skipped: its gradient was not finite


def scale_by_celo2(
    rule: Rule | str | Path = "celo2",
    *,
    overrides: Overrides | None = None,
    published: bool = False,
    skip_nonfinite: bool | None = None,
    hold_unused: bool | None = None,
    momentum_dtype: Any = None,
    newton_schulz_dtype: Any = None,
    kernel: Kernel = "fused",
) -> optax.GradientTransformationExtraArgs:
    """The learned rule on every tensor it is given, without learning rate, decay or sign.

    Args:
        rule: a Rule, the name of a shipped one, a rule file or an hf:// address.
        overrides: regex on a parameter's path → MatrixView or Muon's dimension numbers.
        published: follow the authors' code exactly: the last two axes are the matrix, non-finite
            gradients are used, tensors without gradients drift.
        skip_nonfinite: skip a matrix and its statistics in a step whose gradient is not finite,
            and count that in the state's `skipped`. Default: not `published`.
        hold_unused: do not move a matrix before its first non-zero gradient. Default: not
            `published`.
        momentum_dtype: of the stored momenta; bfloat16 makes the state of the shipped `celo2` 8
            bytes per parameter instead of 12.
        newton_schulz_dtype: the precision of the orthogonalization; float32 by default.
        kernel: how the MLP is computed: in one "fused" loop over the tensor, or by "products" of
            matrices, which takes more memory but is differentiated and compiled faster.

    Example:
        >>> import jax.numpy as jnp
        >>> from celo2.jax import scale_by_celo2
        >>> params = {"kernel": jnp.ones((4, 8))}
        >>> tx = scale_by_celo2()
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> updates["kernel"].shape
        (4, 8)
    """
    rule = as_rule(rule)
    on_views = _rule_on_views(
        rule,
        skip_nonfinite=not published if skip_nonfinite is None else skip_nonfinite,
        hold_unused=not published if hold_unused is None else hold_unused,
        momentum_dtype=momentum_dtype,
        newton_schulz_dtype=newton_schulz_dtype,
        kernel=kernel,
    )

    def views_of(params) -> list[MatrixView]:
        routes = route_all(params, rule.config, overrides=overrides, published=published)
        return [route.view for route in routes]

    def init(params: optax.Params) -> optax.OptState:
        check_leaves(params)
        return on_views(views_of(params)).init(params)

    def update(updates, state, params=None, **extra_args):
        del extra_args
        _check_params(params)
        return on_views(views_of(params)).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(init, update)


def _rule_on_views(
    rule: Rule,
    *,
    skip_nonfinite: bool,
    hold_unused: bool,
    momentum_dtype: Any,
    newton_schulz_dtype: Any,
    kernel: Kernel,
) -> Callable[[list[MatrixView]], optax.GradientTransformation]:
    """The rule as a transformation of tensors with given matrix views, in the order of leaves."""
    check_choice("kernel", kernel, Kernel)
    _check_floating(momentum_dtype=momentum_dtype, newton_schulz_dtype=newton_schulz_dtype)
    config = rule.config
    weights = {name: jnp.asarray(w, jnp.float32) for name, w in rule.weights.items()}
    init = functools.partial(_init_state, config, momentum_dtype)
    update_group = functools.partial(_update_group, weights, config, kernel, newton_schulz_dtype)
    # The moments are computed tensor by tensor, in place of the old: XLA compiles equal kernels
    # only once, and a loop would have to carry them out. One trace for each shape, by jit.
    jitted_update_moments = jax.jit(
        functools.partial(
            update_moments, config, skip_nonfinite=skip_nonfinite, hold_unused=hold_unused
        ),
        static_argnums=0,
    )

    def update(views: list[MatrixView], updates, state, params: Any = None):
        check_same_tree(updates, params)
        grads, treedef = jax.tree.flatten(updates)
        old_moments = _unpack_state(state, params, len(config.momentum_decays))
        jobs, stored = [], []
        for grad, param, view, old in zip(
            grads, jax.tree.leaves(params), views, old_moments, strict=True
        ):
            shape = grad.shape
            param, grad = (to_view(_saturated(x), view) for x in (param, grad))
            axes = axes_of(view, grad.shape)
            _check_shapes(old, axes, grad.shape)
            old = map_large(lambda x, view=view: to_view(x, view), old)
            new, moving = jitted_update_moments(axes, grad, old)
            jobs.append((axes, _Tensor(param, grad, new, moving)))
            stored.append(map_large(lambda x, v=view, s=shape: from_view(x, v, s), new))

        roles = [re.sub(r"\d+", "", path) for path in leaf_paths(params)]
        results = for_each_group(update_group, jobs, roles)
        steps = [
            from_view(step, view, leaf.shape).astype(leaf.dtype)
            for leaf, view, (step, _) in zip(grads, views, results, strict=True)
        ]
        stored = [
            moments._replace(running_rms=running_rms)
            for moments, (_, running_rms) in zip(stored, results, strict=True)
        ]
        count = jnp.asarray(optax.safe_increment(state.count))
        trees = as_trees(Moments, treedef, stored, len(config.momentum_decays))
        return treedef.unflatten(steps), Celo2State(count, *trees)

    def on_views(views: list[MatrixView]) -> optax.GradientTransformation:
        return optax.GradientTransformation(
            functools.partial(init, views), functools.partial(update, views)
        )

    return on_views


def _saturated(x: Array) -> Array:
    """An array in float32, in which a finite float64 stays finite."""
    if jnp.finfo(x.dtype).bits > 32:
        limit = float(jnp.finfo(jnp.float32).max)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)
    return x.astype(jnp.float32)


class _Tensor(NamedTuple):
    """One tensor of an update, in its matrix view and float32."""

    param: Array
    grad: Array
    moments: Moments  # this gradient included
    moving: Array  # which slices move


def _init_state(
    config: RuleConfig, momentum_dtype: Any, views: list[MatrixView], params: optax.Params
) -> Celo2State:
    """The state before the first update."""

    def init_leaf(param: Array, view: MatrixView) -> Moments:
        # Zeros, since the parameter may be a shape only.
        zeros = jnp.zeros_like(param, jnp.float32)
        viewed = to_view(zeros, view)
        moments = init_moments(config, axes_of(view, viewed.shape), viewed, momentum_dtype)
        # From the stored tensor: folding a sharded axis can lose its sharding.
        return map_large(lambda x: jnp.zeros_like(zeros, x.dtype), moments)

    leaves, treedef = jax.tree.flatten(params)
    moments = list(map(init_leaf, leaves, views))
    trees = as_trees(Moments, treedef, moments, len(config.momentum_decays))
    return Celo2State(jnp.zeros([], jnp.int32), *trees)


def _update_group(
    weights: Weights,
    config: RuleConfig,
    kernel: Kernel,
    newton_schulz_dtype: Any,
    axes: Axes,
    tensors: list[_Tensor],
) -> list[tuple[Array, Array]]:
    """The update and the new `running_rms` of each tensor of a group, see `for_each_group`."""
    if tensors[0].grad.size == 0:  # nothing to move, and nothing to take a mean of
        return [(tensor.grad, tensor.moments.running_rms) for tensor in tensors]

    def inputs_of(tensor: _Tensor) -> tuple[Array, Array, Moments]:
        # A slice that does not move has a gradient of zeros, or one that is not finite.
        grad = jnp.where(tensor.moving, clip_gradient(tensor.grad), 0.0)
        return tensor.param, grad, tensor.moments

    precision = {"newton_schulz_dtype": newton_schulz_dtype}

    def update_tensor(tensor: _Tensor) -> tuple[Array, Array]:
        inputs = inputs_of(tensor)
        result = tensor_update(weights, config, axes, *inputs, kernel=kernel, **precision)
        return _if_moving(tensor.moving, *result, tensor.moments.running_rms)

    mesh = mesh_of(tensors)
    orthogonalize = config.orthogonalize and axes.matrix
    if not (orthogonalize and is_worth_redistributing(mesh, len(tensors))):
        return for_each(update_tensor, tensors)

    # The MLP on the tensors as they are sharded, then the rest of the rule on whole matrices.
    def learn(tensor: _Tensor) -> Array:
        return learned_update(weights, config, axes, *inputs_of(tensor), kernel=kernel)

    def finish(update: Array, overshoot: Any, mean: Array, moves: Array, moving: Array):
        result = finish_update(config, axes, update, overshoot, mean, moves, **precision)
        return _if_moving(moving, *result, mean)

    rest = [
        (overshoot_of(config, t.moments), t.moments.running_rms, t.moments.moves, t.moving)
        for t in tensors
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rest)
    return unstack(redistributed(finish, mesh)(loop(learn, tensors), *stacked), len(tensors))


def _if_moving(
    moving: Array, update: Array, running_rms: Array, old_running_rms: Array
) -> tuple[Array, Array]:
    """Slices that do not move have an update of zeros and keep their `running_rms`."""
    return jnp.where(moving, update, 0.0), jnp.where(moving, running_rms, old_running_rms)


def _check_floating(**dtypes: Any) -> None:
    """Raises a ValueError for a dtype that is not floating point."""
    for name, dtype in dtypes.items():
        if dtype is not None and not _is_floating(dtype):
            raise ValueError(f"{name}={dtype!r} must be a floating-point dtype.")


def _is_floating(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(dtype, jnp.floating)
    except TypeError:  # not the name of a dtype
        return False


def _check_numbers(**settings: Any) -> None:
    """Raises a TypeError for a setting that is neither a number nor a schedule of numbers."""
    for name, value in settings.items():
        is_number = isinstance(value, numbers.Real) or hasattr(value, "dtype")
        if not (is_number or callable(value)):
            raise TypeError(f"{name}={value!r} must be a number or a schedule.")


def _check_params(params: optax.Params | None) -> None:
    if params is None:
        raise ValueError(
            "celo2 needs the current parameters: call tx.update(grads, state, params)."
        )


def _unpack_state(state: Celo2State, params: optax.Params, decays: int) -> list[Moments]:
    """The state of each leaf, after checking that it belongs to these parameters."""
    check_same_tree(state.rms, params, "optimizer state")
    if len(state.momentum) != decays:
        raise ValueError(
            f"the optimizer state has {len(state.momentum)} momenta and the rule {decays}: "
            "it was made with another rule."
        )
    return as_leaves(Moments, state[1:])


def _check_shapes(moments: Moments, axes: Axes, shape: tuple[int, ...]) -> None:
    """Raises a ValueError where the state belongs to another matrix view."""
    for name, axes_kept, found in (
        ("row moments", axes.rows, moments.rows.shape[1:]),
        ("counts", axes.slice, moments.moves.shape),
    ):
        expected = tuple(1 if i - len(shape) in axes_kept else n for i, n in enumerate(shape))
        if found != expected:
            raise ValueError(
                f"the optimizer state has {name} of shape {found} for a tensor seen as {shape}: "
                "it was made with other views (see `overrides` and `published`)."
            )


def celo2(
    learning_rate: ScalarOrSchedule,
    *,
    rule: Rule | str | Path = "celo2",
    weight_decay: float | Array = 0.0,
    weight_decay_mask: Mask | None = None,
    rms_scale: float | Array = 1.0,
    scale: Scale = "rms",
    adam_learning_rate: ScalarOrSchedule | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
    adam_eps: float = 1e-8,
    adam_nesterov: bool = True,
    adam: optax.GradientTransformation | None = None,
    adam_mask: Mask | None = None,
    overrides: Overrides | None = None,
    published: bool = False,
    skip_nonfinite: bool | None = None,
    hold_unused: bool | None = None,
    momentum_dtype: Any = None,
    newton_schulz_dtype: Any = None,
    kernel: Kernel = "fused",
) -> optax.GradientTransformationExtraArgs:
    """Celo2: the learned rule on hidden matrices; AdamW on vectors, embeddings and the head.

    `celo2.jax.explain(params)` shows who updates what.

    Args:
        learning_rate: the RMS of the rule's step, or a schedule; 1e-4 … 1e-3 is usual.
        rule: a Rule, the name of a shipped one, a rule file or an hf:// address.
        weight_decay: decoupled, multiplied by the learning rate of each branch.
        weight_decay_mask: a tree of booleans, or a function of the params that returns one.
        rms_scale: a further factor on the rule's updates, 0.2 for the "RMS×0.2" variant.
        scale: "rms" gives the updates of all matrices the same RMS. "spectral" multiplies them by
            √(128 / in), and those of output heads by 128 / in, so that a learning rate tuned on
            a narrow model fits a wide one.
        adam_learning_rate: AdamW's rate or schedule; 5 times `learning_rate` by default.
        adam_b1, adam_b2, adam_eps: AdamW's other settings.
        adam_nesterov: whether AdamW looks ahead with Nesterov's momentum, as beside optax's Muon;
            the paper has False.
        adam: a transformation to use in place of `optax.scale_by_adam` with these settings. It
            gets parameters and gradients in float32 as that does, the gradients within ±1e18.
        adam_mask: a tree of booleans, True where AdamW updates, or a function of the params
            that returns one. If given, it alone decides who updates what.
        overrides: regex on a parameter's path → "rule", "adam", a MatrixView or Muon's
            dimension numbers; the first that matches counts.
        skip_nonfinite: for the rule, see `scale_by_celo2`; for AdamW, treat elements of a gradient
            that are not finite as zeros. `celo2.jax.skipped(state)` counts both.
        published, hold_unused, momentum_dtype, newton_schulz_dtype, kernel: see `scale_by_celo2`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from celo2.jax import celo2
        >>> params = {"hidden": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
        >>> tx = celo2(optax.cosine_decay_schedule(5e-4, 1000), weight_decay=0.1)
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> params = optax.apply_updates(params, updates)
    """
    rule = as_rule(rule)
    check_choice("scale", scale, Scale)
    _check_numbers(learning_rate=learning_rate, weight_decay=weight_decay, rms_scale=rms_scale)
    if adam_learning_rate is not None:
        _check_numbers(adam_learning_rate=adam_learning_rate)
    skip_nonfinite = not published if skip_nonfinite is None else skip_nonfinite
    on_views = _rule_on_views(
        rule,
        skip_nonfinite=skip_nonfinite,
        hold_unused=not published if hold_unused is None else hold_unused,
        momentum_dtype=momentum_dtype,
        newton_schulz_dtype=newton_schulz_dtype,
        kernel=kernel,
    )
    descent = (
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    adam = adam or optax.scale_by_adam(adam_b1, adam_b2, adam_eps, nesterov=adam_nesterov)
    adam = _guarded(adam, skip_nonfinite)
    adam_descent = (
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(
            scale_rate(ADAM_MULTIPLIER, learning_rate)
            if adam_learning_rate is None
            else adam_learning_rate
        ),
    )

    def partition(tree) -> optax.GradientTransformationExtraArgs:
        routes = route_all(tree, rule.config, adam_mask, overrides, published)
        labels = jax.tree.structure(tree).unflatten([route.updater for route in routes])
        by_rule, by_adam = (
            [route for route in routes if route.updater == updater] for updater in ("rule", "adam")
        )
        learned = on_views([route.view for route in by_rule])
        branches: dict[Hashable, optax.GradientTransformation] = {
            "rule": optax.chain(learned, _rescale(rms_scale, scale, by_rule), *descent),
            "adam": optax.chain(adam, _rescale(1.0, scale, by_adam), *adam_descent),
        }
        # In a function: the tree itself may be callable, an equinox module for one.
        return optax.partition(branches, lambda _: labels)

    def init(params: optax.Params) -> optax.OptState:
        check_leaves(params)
        check_overrides(overrides, leaf_paths(params))
        return partition(params).init(params)

    def update(updates, state, params=None, **extra_args):
        _check_params(params)
        check_same_tree(updates, params)
        return partition(updates).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def celo2_base(
    learning_rate: ScalarOrSchedule, *, rule: Rule | str | Path = "celo2-base", **options: Any
) -> optax.GradientTransformationExtraArgs:
    """Celo2-base: the learned rule on every tensor, without orthogonalization.

    Only single-element tensors go to AdamW. Takes the options of `celo2`.

    Example:
        >>> import jax.numpy as jnp
        >>> from celo2.jax import celo2_base
        >>> params = {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
        >>> state = celo2_base(3e-4).init(params)
    """
    return celo2(learning_rate, rule=rule, **options)


# Spelt out for `optax.inject_hyperparams` and for help(), which both read the signature.
celo2_base.__signature__ = inspect.signature(functools.partial(celo2, rule="celo2-base"))


def _rescale(
    factor: float | Array, scale: Scale, routes: list[Route]
) -> optax.GradientTransformation:
    """Multiplies the updates of tensors with these routes, in the order of leaves."""

    def update(updates, state, params=None):
        del params
        leaves, treedef = jax.tree.flatten(updates)
        scaled = [
            factor * scale_factor(scale, route, leaf.shape) * leaf
            for route, leaf in zip(routes, leaves, strict=True)
        ]
        return treedef.unflatten(scaled), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def scale_rate(factor: float, rate: ScalarOrSchedule) -> ScalarOrSchedule:
    """A learning rate, or a schedule, times a factor."""
    if callable(rate):
        return lambda count: factor * rate(count)
    return factor * rate


class AdamState(NamedTuple):
    """The state of AdamW's branch: that of the transformation, and a count for each tensor."""

    inner: optax.OptState
    nonfinite: optax.Params  # steps whose gradient had elements that are not finite


def _guarded(
    tx: optax.GradientTransformation, skip_nonfinite: bool
) -> optax.GradientTransformationExtraArgs:
    """`tx` in float32, on gradients clipped so that their squares do not overflow.

    With `skip_nonfinite`, elements that are not finite become zeros, and such steps are counted.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> AdamState:
        counts = jax.tree.map(lambda _: jnp.zeros([], jnp.int32), params)
        return AdamState(tx.init(jax.tree.map(_to_float32, params)), counts)

    def update(updates, state, params=None, **extra_args):
        grads = jax.tree.map(_to_float32, updates)
        counts = state.nonfinite
        if skip_nonfinite:
            finite = jax.tree.map(jnp.isfinite, grads)
            grads = jax.tree.map(lambda g, ok: jnp.where(ok, g, 0.0), grads, finite)
            counts = jax.tree.map(
                lambda n, ok: jnp.where(jnp.all(ok), n, optax.safe_increment(n)), counts, finite
            )
        limit = ADAM_GRADIENT_LIMIT
        grads = jax.tree.map(lambda g: jnp.clip(g, -limit, limit), grads)
        params = jax.tree.map(_to_float32, params)
        steps, inner = tx.update(grads, state.inner, params, **extra_args)
        steps = jax.tree.map(lambda step, g: step.astype(g.dtype), steps, updates)
        return steps, AdamState(inner, counts)

    return optax.GradientTransformationExtraArgs(init, update)


def _to_float32(x: Any) -> Any:
    """An array, or a shape, in float32 if it has fewer bits."""
    # Not promote_types, which has no answer for floats of 8 bits.
    dtype = x.dtype if jnp.finfo(x.dtype).bits > 32 else jnp.float32
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=dtype)
    return x.astype(dtype)


class Skipped(NamedTuple):
    """Numbers of gradients that were not finite, over all tensors and steps so far."""

    rule: Array  # matrices that the rule skipped
    adam: Array  # tensors of which AdamW treated some elements as zeros


def skipped(state: optax.OptState) -> Skipped:
    """The number of gradients so far with elements that are not finite.

    Args:
        state: of `celo2`, `celo2_base` or `scale_by_celo2`, by itself or within the state of
            another transformation.

    Example:
        >>> import jax.numpy as jnp
        >>> from celo2.jax import celo2, skipped
        >>> params = {"hidden": jnp.ones((4, 8)), "bias": jnp.zeros(8)}
        >>> bad = {"hidden": jnp.full((4, 8), jnp.nan), "bias": jnp.ones(8)}
        >>> tx = celo2(1e-3)
        >>> _, state = tx.update(bad, tx.init(params), params)
        >>> rule, adam = skipped(state)
        >>> int(rule), int(adam)
        (1, 0)
    """
    ours = [
        part
        for part in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, (Celo2State, AdamState)))
        if isinstance(part, (Celo2State, AdamState))
    ]
    if not ours:
        raise ValueError("skipped needs the state of celo2, celo2_base or scale_by_celo2.")

    def total(counts: list[Any]) -> Array:
        return sum((jnp.sum(x) for x in jax.tree.leaves(counts)), jnp.zeros([], jnp.int32))

    return Skipped(
        rule=total([part.skipped for part in ours if isinstance(part, Celo2State)]),
        adam=total([part.nonfinite for part in ours if isinstance(part, AdamState)]),
    )


def explain(
    params,
    *,
    rule: Rule | str | Path = "celo2",
    adam_mask: Mask | None = None,
    overrides: Overrides | None = None,
    published: bool = False,
) -> Explanation:
    """A printable table of who updates each tensor under `celo2` with the same arguments.

    Args:
        params: the parameters, or their shapes as `jax.eval_shape` gives them.
        rule, adam_mask, overrides, published: as for `celo2`.

    Example:
        >>> import jax.numpy as jnp
        >>> from celo2.jax import explain
        >>> table = explain({"embed": jnp.ones((9, 4)), "mlp": jnp.ones((4, 8))})
        >>> [(line.path, line.updater) for line in table]
        [('embed', 'adam'), ('mlp', 'rule')]
    """
    check_leaves(params)
    check_overrides(overrides, leaf_paths(params))
    routes = route_all(params, as_rule(rule).config, adam_mask, overrides, published)
    return Explanation(
        Line(path, leaf.shape, *route, route.view.shape(leaf.shape), math.prod(leaf.shape))
        for path, leaf, route in zip(
            leaf_paths(params), jax.tree.leaves(params), routes, strict=True
        )
    )


def leaf_paths(tree) -> list[str]:
    """The path of every leaf, such as "block_0/attention/query/kernel"."""
    return [
        jax.tree_util.keystr(_unboxed(path), simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _unboxed(path: tuple) -> tuple:
    """The path without flax's box around an array: `kernel` for `kernel.value`."""
    boxed = path and path[-1] == jax.tree_util.GetAttrKey("value")
    return path[:-1] if boxed else path


def route_all(
    tree,
    config: RuleConfig,
    adam_mask: Mask | None = None,
    overrides: Overrides | None = None,
    published: bool = False,
) -> list[Route]:
    """The route of every leaf in the order of `jax.tree.leaves`, the user's mask included."""
    routes = [
        route(path, leaf.shape, config, overrides, published)
        for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    ]
    if adam_mask is None or not routes:
        return routes
    # A tree may be callable too, an equinox module for one.
    is_function = callable(adam_mask) and jax.tree_util.all_leaves([adam_mask])
    mask = adam_mask(tree) if is_function else adam_mask
    try:
        chosen = jax.tree.map(lambda adam, part: jax.tree.map(lambda _: adam, part), mask, tree)
    except ValueError as error:
        raise ValueError(f"adam_mask does not fit the parameters: {error}") from None
    return [
        route._replace(updater="adam" if adam else "rule", reason="adam_mask")
        for route, adam in zip(routes, jax.tree.leaves(chosen), strict=True)
    ]


def to_view(x: Array, view: MatrixView) -> Array:
    """A stored tensor as (batch…, in, out)."""
    shape = view.shape(x.shape)
    if view.order != tuple(range(x.ndim)):
        x = jnp.transpose(x, view.order)
    return x.reshape(shape)


def from_view(x: Array, view: MatrixView, stored: tuple[int, ...]) -> Array:
    """The stored form of a viewed tensor."""
    x = x.reshape(tuple(stored[axis] for axis in view.order))
    if view.order == tuple(range(len(stored))):
        return x
    return jnp.transpose(x, sorted(range(len(stored)), key=view.order.__getitem__))


def check_leaves(params) -> None:
    """Raises a TypeError that names the first parameter that is not a real floating array."""
    for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not hasattr(leaf, "shape"):
            raise TypeError(f"celo2 updates arrays, but {path} is a {type(leaf).__name__}.")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"celo2 updates real floating-point parameters, but {path} is {dtype}; "
                "leave it out with optax.masked or optax.partition."
            )


def check_same_tree(tree, params, what: str = "gradients") -> None:
    """Raises an error that says how gradients (or another tree) and parameters differ."""
    if jax.tree.structure(tree) != jax.tree.structure(params):
        ours, theirs = leaf_paths(tree), leaf_paths(params)
        extra = sorted(set(ours) ^ set(theirs))[:3]
        raise ValueError(
            f"{what} and parameters are different trees ({len(ours)} and {len(theirs)} leaves"
            + (f"; only one has {', '.join(extra)})." if extra else ").")
        )
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(params), strict=True)
    for i, (leaf, param) in enumerate(leaves):
        if jnp.shape(leaf) != jnp.shape(param):
            raise ValueError(
                f"{leaf_paths(params)[i]} has shape {jnp.shape(leaf)} in the {what} and "
                f"{jnp.shape(param)} in the parameters."
            )
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"{leaf_paths(params)[i]} is {jnp.result_type(leaf)} in the {what}, not a real "
                "floating-point array."
            )
