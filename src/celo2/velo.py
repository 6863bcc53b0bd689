"""The rules of VeLO and Celo: an LSTM that steers a small MLP, as a config and named arrays.

VeLO is Metz et al. 2022 (arXiv 2211.09760), Celo is Moudgil et al. 2025 (arXiv 2501.12670).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from celo2.rule import (
    Rule,
    RuleConfig,
    check_choices,
    match_shapes,
    truncated_normal,
    weight_shapes,
)

Optimizer = Literal["velo", "celo"]

# Rounded to float32, with which the weights were trained: 1 - 0.999 is then 0.00100004673.
DECAYS = tuple(float(np.float32(decay)) for decay in (0.9, 0.99, 0.999))
# The MLP that runs on every parameter, in the words of a Celo2 rule.
MLP = RuleConfig(
    hidden=(4, 4),
    momentum_decays=DECAYS,
    rms_decay=DECAYS[-1],
    factored_decays=DECAYS,
    form="d_exp_m",
    norm="raw",
    orthogonalize=False,
    vectors="rule",
)
LOSS_MEANS = 10  # running means of the loss; each is compared with the next slower one
FRACTIONS = (0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1)  # of a run, inputs of the LSTM
RANKS = 5
STATISTICS = 1 + RANKS + 2 * len(MLP.momentum_decays)  # of a tensor


@dataclass(frozen=True)
class VeloConfig:
    """What VeLO or Celo computes; everything else about it is in its weights.

    Args:
        optimizer: whose rule it is. VeLO's LSTM sees every tensor and mixes an MLP for each;
            Celo's sees the run as a whole and scales the steps of a single MLP.
        lstm: the width of the LSTM.
        banks: MLPs that VeLO mixes; Celo has one.
        bank_scale: a factor on the mixed MLP: 100 in the official VeLO, 1 in those that Celo's
            authors trained.
        loss_horizon: the longest time constant of the loss's running means in steps; None is the
            number of steps of the run. 10 is what `use_bugged_loss_features` means in the
            published code, where it is the default, though not the official checkpoint's.
    """

    optimizer: Optimizer = "velo"
    lstm: int = 512
    banks: int = 256
    bank_scale: float = 100.0
    loss_horizon: int | None = None

    def __post_init__(self):
        check_choices(self)
        numbers = {"lstm": self.lstm, "banks": self.banks}
        if self.loss_horizon is not None:
            numbers["loss_horizon"] = self.loss_horizon
        for name, value in numbers.items():
            if type(value) is not int or not 1 <= value <= 2**31 - 1:
                raise ValueError(f"{name}={value!r} must be an integer from 1 up.")
        scale = self.bank_scale
        if type(scale) not in (int, float) or not 0 < scale < math.inf:
            raise ValueError(f"bank_scale={scale!r} must be a positive number.")
        if self.optimizer == "celo" and (self.banks, self.bank_scale) != (1, 1):
            raise ValueError(
                f"banks={self.banks} and bank_scale={scale:g}: Celo has one MLP, which nothing "
                "mixes; both must be 1."
            )

    @property
    def inputs(self) -> int:
        """Numbers that the LSTM reads of a tensor, or of the run."""
        of_run = len(FRACTIONS) + LOSS_MEANS - 1
        return of_run + (STATISTICS if self.optimizer == "velo" else 0)


@dataclass(frozen=True, eq=False)
class VeloRule(Rule):
    """The weights of VeLO or Celo: those of the MLPs (w0 b0 w1 b1 w2 b2, all with an axis of banks
    first), of the LSTM and of what surrounds it, under their published names.
    """

    # Another config than Celo2's: `rulefile.as_rule` keeps each to its own optimizer.
    config: VeloConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self):
        check_velo_shapes(self.config, {name: np.shape(w) for name, w in self.weights.items()})


def velo_shapes(config: VeloConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every array of a rule with this config."""
    width = config.lstm
    layers = {
        "linear": (config.inputs, width),  # in every checkpoint, but not used
        "linear_1": (config.inputs, width),
        "linear_2": (config.inputs, width),
        "lstm": (2 * width, 4 * width),
        "controls": (width, config.banks),
        "step_size": (width, 1),
    }
    shapes: dict[str, tuple[int, ...]] = {
        name: (config.banks, *shape) for name, shape in weight_shapes(MLP).items()
    }
    shapes |= {"lstm.hidden": (1, width), "lstm.cell": (1, width)}
    for name, (fan_in, fan_out) in layers.items():
        shapes |= {f"{name}.w": (fan_in, fan_out), f"{name}.b": (fan_out,)}
    return shapes


def check_velo_shapes(config: VeloConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises a ValueError that says how `shapes` differs from what `config` needs."""
    what = f"A rule for {config.optimizer} with lstm={config.lstm} and banks={config.banks}"
    match_shapes(what, velo_shapes(config), shapes, "was it made with other widths?")


def initial_velo_weights(config: VeloConfig, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Fresh weights as the published code draws them: a normal cut at two standard deviations of
    1/√fan_in, everything else zero.

    >>> weights = initial_velo_weights(CELO, np.random.default_rng(0))
    """
    return {
        name: truncated_normal(rng, shape) / np.float32(math.sqrt(shape[-2]))
        if name.endswith(".w") or name.startswith("w")
        else np.zeros(shape, np.float32)
        for name, shape in velo_shapes(config).items()
    }


VELO = VeloConfig()
CELO = VeloConfig("celo", lstm=64, banks=1, bank_scale=1.0)
