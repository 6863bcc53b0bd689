"""A rule: a small frozen config plus a handful of named arrays."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np

Form = Literal["d", "d_exp_m", "d_exp_m_avg"]
Norm = Literal["raw", "norm", "norm_clip", "rolling_norm", "rolling_norm_clip"]
Vectors = Literal["adam", "rule"]
Start = Literal[
    "random",
    "momentum",
    "momentum_over_rms",
    "factored_momentum",
    "nesterov",
    "nesterov_over_rms",
    "nesterov_over_factored",
    "nesterov_over_both",
]
Mix = Mapping[str, Sequence[float]]  # feature -> a coefficient for each of its columns


class Feature(NamedTuple):
    """One group of input columns; `per_decay` groups have a column for each decay."""

    name: str
    per_decay: bool
    matrices_only: bool
    odd: bool  # changes its sign with the gradients and the parameters


# The order of the first layer's rows, as in the published checkpoints.
FEATURES = (
    Feature("gradient", False, False, True),
    Feature("clipped_gradient", False, False, True),
    Feature("parameter", False, False, True),
    Feature("momentum", True, False, True),
    Feature("rms", False, False, False),
    Feature("momentum_over_rms", True, False, True),
    Feature("inverse_rms", False, False, False),
    Feature("factored_gradient", True, False, True),
    Feature("gradient_over_rms", False, False, True),
    Feature("row", True, True, False),
    Feature("column", True, True, False),
    Feature("inverse_row", True, True, False),
    Feature("inverse_column", True, True, False),
    Feature("factored_momentum", True, True, True),
)

OUTPUTS = 3  # direction, magnitude, and one channel the paper's rule leaves unused

# Constants of the published algorithm that no config changes, shared by JAX and Torch.

# Moments.
GRADIENT_LIMIT = 1000.0
FACTORED_FLOOR = 1e-30  # keeps a factored moment positive where squares underflow
LAST_COUNT = 2**31 - 1

# Features.
CLIP = 0.1
RMS_EPSILON = 1e-8
FACTORED_EPSILON = 1e-9

# The update.
EPSILON = 1e-9
CANCELLATION_WIDTH = 0.3
CANCELLATION_LIMIT = 1.5
MAGNITUDE_SCALE = 0.001
CLIP_RMS = 1.0
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_EPSILON = 1e-8
OVERSHOOT_STEP = 2  # the iterate that an overshoot subtracts a part of

# AdamW's branch: ours, not the paper's.
# Its rate as a multiple of the learning rate: the ratio that Muon has with updates of RMS 0.2.
ADAM_MULTIPLIER = 5.0
ADAM_GRADIENT_LIMIT = 1e18  # squares of larger gradients would overflow in float32

REFERENCE_WIDTH = 128  # inputs of a matrix whose updates are the same with either `scale`


@dataclass(frozen=True)
class RuleConfig:
    """What a rule computes; everything else about it is in its weights.

    Args:
        hidden: widths of the MLP's hidden layers.
        momentum_decays: decays of the momenta, one momentum each.
        rms_decay: decay of the elementwise second moment.
        factored_decays: decays of the factored second moments, one moment each.
        form: formula of the update from the MLP's direction d and magnitude m: d; d_exp_m is d
            exp(0.001 m); d_exp_m_avg uses the mean of m.
        norm: scaling of the update: raw (none); norm, to an RMS of 1; norm_clip, to an RMS of at
            most 1; the rolling forms use the mean RMS of all updates so far.
        orthogonalize: whether the updates of matrices are orthogonalized by Newton–Schulz.
        vectors: optimizer of tensors with fewer than two axes: adam, or the rule.
        gated: whether to add a second matrix, g0, to the first layer's w0 in proportion to how far
            successive gradients cancel each other (`cancellation_scale`). Not in the paper.
        overshoot: largest fraction of the second Newton–Schulz iterate to subtract from the last
            one, at most 0.5; reached where successive gradients cancel each other most. Gives small
            singular values longer steps than large ones. Not in the paper.
    """

    hidden: tuple[int, ...] = (8, 8)
    momentum_decays: tuple[float, ...] = (0.9, 0.99, 0.999)
    rms_decay: float = 0.95
    factored_decays: tuple[float, ...] = (0.9, 0.99, 0.999)
    form: Form = "d"
    norm: Norm = "norm"
    orthogonalize: bool = True
    vectors: Vectors = "adam"
    gated: bool = False
    overshoot: float = 0.0

    def __post_init__(self):
        check_choices(self)
        for name in ("hidden", "momentum_decays", "factored_decays"):
            values = getattr(self, name)
            if isinstance(values, str) or not isinstance(values, (tuple, list)) or not values:
                raise ValueError(f"{name}={values!r} must be a non-empty tuple.")
            object.__setattr__(self, name, tuple(values))
        if not all(_is_int(width) and 1 <= width <= 4096 for width in self.hidden):
            raise ValueError(f"hidden={self.hidden!r} must hold integers from 1 to 4096.")
        if len(self.momentum_decays) != len(self.factored_decays):
            raise ValueError(
                f"momentum_decays has {len(self.momentum_decays)} entries and factored_decays "
                f"{len(self.factored_decays)}: each momentum is normalised by its own factored "
                "moment, so give as many of one as of the other."
            )
        for decay in (*self.momentum_decays, self.rms_decay, *self.factored_decays):
            if not _is_real(decay) or not 0.0 <= decay < 1.0:
                raise ValueError(f"decay {decay!r} must be a number in [0, 1).")
        if not _is_real(self.overshoot) or not 0.0 <= self.overshoot <= 0.5:
            raise ValueError(f"overshoot={self.overshoot!r} must be a number in [0, 0.5].")
        for name in ("orthogonalize", "gated"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")


@dataclass(frozen=True, eq=False)
class Rule:
    """A learned update rule: its config, its MLP's arrays (w0 b0 w1 b1 …, and g0 where it
    is gated) and where it comes from.

    The arrays may be numpy arrays or, inside meta-training, traced JAX arrays.
    """

    config: RuleConfig
    weights: Mapping[str, Any]
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_shapes(self.config, {name: np.shape(w) for name, w in self.weights.items()})


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raises a ValueError unless the value is one of a Literal's."""
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r} is not one of {', '.join(get_args(choices))}.")


def check_choices(config: Any) -> None:
    """Checks every field of a dataclass whose type is a Literal."""
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal:
            check_choice(name, getattr(config, name), hint)


def feature_width(config: RuleConfig, feature: Feature) -> int:
    """How many columns a feature has."""
    return len(config.momentum_decays) if feature.per_decay else 1


def feature_count(config: RuleConfig, *, vector: bool = False) -> int:
    """How many columns a matrix has (30 by default), or a vector (15)."""
    return sum(
        feature_width(config, feature)
        for feature in FEATURES
        if not (vector and feature.matrices_only)
    )


def feature_rows(config: RuleConfig) -> dict[str, slice]:
    """The rows of the first layer for each feature."""
    rows, start = {}, 0
    for feature in FEATURES:
        stop = start + feature_width(config, feature)
        rows[feature.name] = slice(start, stop)
        start = stop
    return rows


def odd_features(config: RuleConfig) -> np.ndarray:
    """Whether each column changes its sign with the gradients and the parameters."""
    return np.repeat([f.odd for f in FEATURES], [feature_width(config, f) for f in FEATURES])


def weight_shapes(config: RuleConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every array of a rule with this config."""
    widths = (feature_count(config), *config.hidden, OUTPUTS)
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (fan_in, fan_out) in enumerate(zip(widths, widths[1:], strict=False)):
        shapes[f"w{i}"] = (fan_in, fan_out)
        shapes[f"b{i}"] = (fan_out,)
    if config.gated:
        shapes["g0"] = shapes["w0"]
    return shapes


def cancellation_scale(config: RuleConfig) -> tuple[float, float]:
    """(a, b) of the cancellation, which is a + b log(mean(m²) / mean(g²)) within [0, 1.5].

    m is the first momentum, mean(g²) the first factored moment's. Where successive gradients are
    independent, that ratio is (1 - β) / (1 + β) for a momentum of decay β, and the cancellation
    0; so it is where they agree. It is 1 where the logarithm is 1.3 times as far below zero.
    """
    decay = config.momentum_decays[0]
    independent = math.log1p(decay) - math.log1p(-decay)
    slope = 1 / (CANCELLATION_WIDTH * max(independent, EPSILON))
    return -1 / CANCELLATION_WIDTH, -slope


def check_shapes(config: RuleConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises a ValueError that says how `shapes` differs from what `config` needs."""
    match_shapes(
        f"A rule with hidden={config.hidden}",
        weight_shapes(config),
        shapes,
        "was the file made with other decays or hidden widths?",
    )


def match_shapes(
    what: str,
    expected: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    hint: str,
) -> None:
    """Raises a ValueError that says how `shapes` differs from the shapes expected of `what`."""
    missing = sorted(expected.keys() - shapes.keys())
    unknown = sorted(shapes.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"{what} has arrays {', '.join(expected)}; "
            f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}."
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise ValueError(
                f"{name} has shape {tuple(shapes[name])} but this config needs {shape}; {hint}"
            )


# Nesterov's momentum of decay 0.95 as a mix of gradient and momenta 0.9 and 0.99, each divided by
# its RMS: least squares of its kernel under white noise. A momentum of 0.999 would fit closer with
# a negative coefficient, but that raised the loss by 2 to 3 % in runs of 10,000 steps (one task,
# one seed).
_NESTEROV_GRADIENT, _NESTEROV_MOMENTA = 0.216, (0.704, 0.259)


def _nesterov(gradient: str, momentum: str, column: int = 0, scale: float = 1.0) -> Mix:
    """The mix on these features, with the gradient in one of its columns."""
    return {
        gradient: [0.0] * column + [scale * _NESTEROV_GRADIENT],
        momentum: [scale * c for c in _NESTEROV_MOMENTA],
    }


# Update directions that are known to work. Coefficients are for features divided by their RMS; a
# list shorter than a feature's columns leaves the rest at zero.
STARTS: dict[str, Mix] = {
    "momentum": {"momentum": [1.0]},
    "momentum_over_rms": {"momentum_over_rms": [1.0]},
    "factored_momentum": {"factored_momentum": [1.0]},
    "nesterov": _nesterov("gradient", "momentum"),
    "nesterov_over_rms": _nesterov("gradient_over_rms", "momentum_over_rms"),
    "nesterov_over_factored": _nesterov("factored_gradient", "factored_momentum", 1),
    "nesterov_over_both": {
        **_nesterov("gradient_over_rms", "momentum_over_rms", scale=0.5),
        **_nesterov("factored_gradient", "factored_momentum", 1, scale=0.5),
    },
}


def initial_weights(
    config: RuleConfig, rng: np.random.Generator, start: str | Mix = "random"
) -> dict[str, np.ndarray]:
    """Fresh MLP weights: normal cut at two standard deviations of 1/√fan_in, zero biases.

    Unless `start` is random, the direction they give is a linear mix of features: one of `STARTS`,
    or a coefficient for each column of the features it names.

    >>> weights = initial_weights(CELO2, np.random.default_rng(0), {"momentum": [0.7, 0.3]})
    """
    weights = {
        name: truncated_normal(rng, shape) / np.float32(math.sqrt(shape[0]))
        if name.startswith("w")
        else np.zeros(shape, np.float32)
        for name, shape in weight_shapes(config).items()
    }
    if start == "random":
        return weights
    if isinstance(start, str) and start not in STARTS:
        raise ValueError(f"start={start!r} is not one of random, {', '.join(STARTS)}.")
    _carry(config, weights, mix_column(config, STARTS[start] if isinstance(start, str) else start))
    return weights


def mix_column(config: RuleConfig, mix: Mix) -> np.ndarray:
    """A mix as one column of the first layer: a coefficient for every feature column."""
    column = np.zeros(feature_count(config), np.float32)
    for name, coefficients in mix.items():
        rows = feature_rows(config).get(name)
        if rows is None:
            names = ", ".join(feature.name for feature in FEATURES)
            raise ValueError(f"{name!r} is not a feature; there are {names}.")
        if len(coefficients) > rows.stop - rows.start:
            raise ValueError(
                f"{name} has {rows.stop - rows.start} columns under this config, but the mix has "
                f"{len(coefficients)} coefficients for it."
            )
        column[rows.start : rows.start + len(coefficients)] = coefficients
    if not np.isfinite(column).all() or not column.any():
        raise ValueError(f"the mix {dict(mix)!r} must have finite coefficients, not all zero.")
    return column


def _carry(config: RuleConfig, weights: dict[str, np.ndarray], column: np.ndarray) -> None:
    """Makes a linear mix of features the MLP's direction.

    Two units of each layer carry its positive and its negative part; the others have no effect
    until they are trained.
    """
    if min(config.hidden) < 2:
        raise ValueError(f"hidden={config.hidden} must be 2 or wider to carry a feature through.")
    last = len(config.hidden)
    weights["w0"][:, 0], weights["w0"][:, 1] = column, -column
    for layer in range(1, last):
        weights[f"w{layer}"][:, :2] = 0.0
        weights[f"w{layer}"][[0, 1], [0, 1]] = 1.0
    weights[f"w{last}"][:] = 0.0
    weights[f"w{last}"][:2, 0] = 1.0, -1.0


def make_odd(config: RuleConfig, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The nearest weights whose direction is an odd function of gradients and parameters.

    Reflecting coordinates of a problem then reflects its solution, as with Adam or Muon, and with
    only zero gradients no bias moves a parameter. Hidden units are tied in pairs that exchange
    their values when the inputs change sign. Arrays may be NumPy's or JAX's.
    """
    check_pairs(config)
    signs = np.where(odd_features(config), -1.0, 1.0).astype(np.float32)
    last = len(config.hidden)
    outputs = np.array([-1.0, 1.0, 1.0], np.float32)  # the direction is odd
    odd = {}
    for layer in range(last + 1):
        weight, bias = weights[f"w{layer}"], weights[f"b{layer}"]
        mirrored = weight[_partners(len(weight))] if layer else signs[:, None] * weight
        if layer < last:
            partners = _partners(len(bias))
            mirrored, mirrored_bias = mirrored[:, partners], bias[partners]
        else:
            mirrored, mirrored_bias = mirrored * outputs[None], bias * outputs
        odd[f"w{layer}"], odd[f"b{layer}"] = (weight + mirrored) / 2, (bias + mirrored_bias) / 2
    if config.gated:
        gate = weights["g0"]
        odd["g0"] = (gate + (signs[:, None] * gate)[:, _partners(gate.shape[1])]) / 2
    return odd


def without_idle_units(rule: Rule) -> Rule:
    """A rule with the same updates and the smallest MLP.

    Hidden units on which no output of the rule's form depends are removed, and so are layers that
    are the identity: a second ReLU changes nothing.
    """
    weights = {name: np.asarray(weight, np.float32) for name, weight in rule.weights.items()}
    layers = [(weights[f"w{i}"], weights[f"b{i}"]) for i in range(len(rule.config.hidden) + 1)]
    reads = layers[-1][0][:, : 1 if rule.config.form == "d" else 2]
    used = np.arange(1)
    for i in reversed(range(len(layers) - 1)):
        used = np.flatnonzero(reads.any(1)) if reads.any() else np.arange(1)  # one at least
        layers[i + 1] = layers[i + 1][0][used], layers[i + 1][1]
        layers[i] = layers[i][0][:, used], layers[i][1][used]
        reads = layers[i][0]
    first, *middle, last = layers
    kept = [first, *(layer for layer in middle if not _is_identity(*layer)), last]
    smaller = {f"w{i}": weight for i, (weight, _) in enumerate(kept)}
    smaller |= {f"b{i}": bias for i, (_, bias) in enumerate(kept)}
    if rule.config.gated:
        smaller["g0"] = weights["g0"][:, used]
    hidden = tuple(len(bias) for _, bias in kept[:-1])
    return Rule(dataclasses.replace(rule.config, hidden=hidden), smaller, rule.origin)


def _is_identity(weight: np.ndarray, bias: np.ndarray) -> bool:
    return np.array_equal(weight, np.eye(*weight.shape)) and not bias.any()


def check_pairs(config: RuleConfig) -> None:
    """Raises a ValueError where a layer's units cannot be tied in pairs."""
    if any(width % 2 for width in config.hidden):
        raise ValueError(f"hidden={config.hidden} must be even for an odd rule: units go in pairs.")


def _partners(width: int) -> np.ndarray:
    return np.arange(width) ^ 1  # 1, 0, 3, 2, …


def truncated_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal numbers, redrawn where their absolute value is above two."""
    draw = rng.standard_normal(shape)
    while (outside := np.abs(draw) > 2).any():
        draw[outside] = rng.standard_normal(int(outside.sum()))
    return draw.astype(np.float32)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


CELO2 = RuleConfig()
"""The config of Celo2: hidden matrices by the rule, orthogonalized, the rest by AdamW."""
CELO2_BASE = RuleConfig(orthogonalize=False, vectors="rule")
"""The config of Celo2-base: every tensor by the rule, nothing orthogonalized."""
