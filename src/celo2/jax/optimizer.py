"""The rule as an Optax transformation."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from celo2.jax.grouping import Together, for_each_shape, roles_of
from celo2.jax.moments import (
    Moments,
    clip_gradient,
    init_moments,
    update_moments,
)
from celo2.jax.spread import is_worth_spreading, spread
from celo2.jax.trees import check_leaves, check_same_tree, from_view, leaf_routes, to_view
from celo2.jax.update import newton_schulz, propose, settle
from celo2.routing import Axes, MatrixView, Overrides, axes_of
from celo2.rule import Rule
from celo2.rulefile import as_rule


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
    skipped: optax.Params  # steps each matrix sat out because its gradient was not finite


def scale_by_celo2(
    rule: Rule | str | Path = "celo2",
    *,
    overrides: Overrides | None = None,
    published: bool = False,
    skip_nonfinite: bool | None = None,
    hold_unused: bool | None = None,
    momentum_dtype: Any = None,
    newton_schulz_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """The learned rule on every tensor it is given, without learning rate, decay or sign.

    Args:
        rule: a Rule, the name of a shipped one, a rule file or an hf:// address.
        overrides: regex on a parameter's path → MatrixView or Muon's dimension numbers.
        published: follow the authors' code to the letter: the last two axes are the matrix,
            non-finite gradients go in, tensors without gradients drift.
        skip_nonfinite: leave a matrix and its statistics alone for a step whose gradient is not
            finite, and count it in the state's `skipped`. Default: not `published`.
        hold_unused: keep a matrix still until its first non-zero gradient. Default: not
            `published`.
        momentum_dtype: how momenta are stored; bfloat16 makes the state 10 bytes per parameter
            instead of 16.
        newton_schulz_dtype: the precision of the orthogonalization; float32 by default.

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
    config = rule.config
    weights = {name: jnp.asarray(w, jnp.float32) for name, w in rule.weights.items()}
    skip_nonfinite = not published if skip_nonfinite is None else skip_nonfinite
    hold_unused = not published if hold_unused is None else hold_unused
    rolling = config.norm.startswith("rolling")

    def views_of(tree) -> list[MatrixView]:
        return [route.view for route in leaf_routes(tree, config, overrides, published)]

    def init(params: optax.Params) -> Celo2State:
        check_leaves(params)
        views = iter(views_of(params))

        def init_leaf(param: Array) -> Moments:
            view = next(views)
            viewed = to_view(param, view)
            moments = init_moments(config, axes_of(view, viewed.shape), viewed, momentum_dtype)
            # From the stored tensor: folding a sharded axis can lose its sharding.
            return _map_whole(lambda x: jnp.zeros_like(param, x.dtype), moments)

        return _pack(
            jnp.zeros([], jnp.int32), jax.tree.map(init_leaf, params), len(config.momentum_decays)
        )

    # The moments are computed tensor by tensor, in place of the old: XLA compiles equal kernels
    # only once, and a loop would have to carry them out. One trace for each shape, by jit.
    @functools.partial(jax.jit, static_argnums=0)
    def remember(axes: Axes, grad: Array, old: Moments) -> tuple[Moments, Array]:
        if grad.size == 0:
            return old, old.moves > 0
        new, moving = update_moments(
            config, axes, grad, old, skip_nonfinite=skip_nonfinite, hold_unused=hold_unused
        )
        dtype = old.momentum[0].dtype
        return new._replace(momentum=tuple(m.astype(dtype) for m in new.momentum)), moving

    def propose_one(axes: Axes, job: tuple) -> tuple[Array, Moments, Array]:
        param, grad, moments, moving = job
        known = moments._replace(momentum=(), rms=None, rows=None, cols=None)
        if grad.size == 0:  # nothing to move, and nothing to take a mean of
            return param, known, moving
        # What does not move has a gradient of zeros, or one that is not finite.
        grad = jnp.where(moving, clip_gradient(grad), 0.0)
        proposal = propose(config, weights, axes, param, grad, moments)
        return proposal, known, moving

    def settle_one(axes: Axes, proposed: tuple, place=lambda function: function) -> tuple:
        proposal, moments, moving = proposed
        if proposal.size == 0:
            return proposal, moments.running_rms
        orthogonalize = place(functools.partial(newton_schulz, dtype=newton_schulz_dtype))
        step, running_rms = settle(config, axes, proposal, moments, orthogonalize)
        if rolling:
            running_rms = jnp.where(moving, running_rms, moments.running_rms)
        return jnp.where(moving, step, 0.0), running_rms

    def update_one(axes: Axes, job: tuple) -> tuple[Array, Array | None]:
        return settle_one(axes, propose_one(axes, job))

    def update_stack(axes: Axes, stacked: tuple) -> tuple[Array, Array | None]:
        return settle_one(axes, stacked, spread)

    together = Together(is_worth_spreading, propose_one, update_stack)
    if not config.orthogonalize:
        together = None

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                "celo2 needs the current parameters: call tx.update(grads, state, params)."
            )
        check_same_tree(updates, params)
        grads, treedef = jax.tree.flatten(updates)
        views = views_of(params)
        memory = _unpack(state, params, len(config.momentum_decays))
        jobs, stored = [], []
        for grad, param, view, old in zip(
            grads, jax.tree.leaves(params), views, memory, strict=True
        ):
            shape = grad.shape
            param, grad = (to_view(x.astype(jnp.float32), view) for x in (param, grad))
            axes = axes_of(view, grad.shape)
            _check_shapes(old, axes, grad.shape)
            old = _map_whole(lambda x, view=view: to_view(x, view), old)
            new, moving = remember(axes, grad, old)
            seen = new._replace(skipped=None)
            if not rolling:
                seen = seen._replace(running_rms=None, moves=None)
            jobs.append((axes, (param, grad, seen, moving)))
            stored.append(_map_whole(lambda x, v=view, s=shape: from_view(x, v, s), new))

        steps = []
        results = for_each_shape(update_one, jobs, roles_of(params), together)
        for i, (leaf, view, (step, running_rms)) in enumerate(
            zip(grads, views, results, strict=True)
        ):
            steps.append(from_view(step, view, leaf.shape).astype(leaf.dtype))
            if rolling:
                stored[i] = stored[i]._replace(running_rms=running_rms)
        count = jnp.asarray(optax.safe_increment(state.count))
        new_state = _pack(count, treedef.unflatten(stored), len(config.momentum_decays))
        return treedef.unflatten(steps), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _map_whole(function, moments: Moments) -> Moments:
    """The moments with `function` applied to those that are as large as the tensor."""
    return moments._replace(
        momentum=tuple(map(function, moments.momentum)), rms=function(moments.rms)
    )


def _pack(count: Array, moments, decays: int) -> Celo2State:
    """A tree of Moments as a state of trees."""

    def pick(get) -> optax.Params:
        return jax.tree.map(get, moments, is_leaf=lambda x: isinstance(x, Moments))

    return Celo2State(
        count,
        tuple(pick(lambda m, i=i: m.momentum[i]) for i in range(decays)),
        pick(lambda m: m.rms),
        pick(lambda m: m.rows),
        pick(lambda m: m.cols),
        pick(lambda m: m.running_rms),
        pick(lambda m: m.moves),
        pick(lambda m: m.skipped),
    )


def _unpack(state: Celo2State, params: optax.Params, decays: int) -> list[Moments]:
    """The state of each leaf, after checking that it belongs to these parameters."""
    check_same_tree(state.rms, params, "optimizer state")
    if len(state.momentum) != decays:
        raise ValueError(
            f"the optimizer state has {len(state.momentum)} momenta and the rule {decays}: "
            "it was made with another rule."
        )

    momentum = list(zip(*map(jax.tree.leaves, state.momentum), strict=True))
    rest = map(jax.tree.leaves, state[2:])
    return [Moments(*leaf) for leaf in zip(momentum, *rest, strict=True)]


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
