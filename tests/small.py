"""Small rules, shared by the tests of both frameworks."""

import dataclasses

import numpy as np

from celo2.rule import Rule, RuleConfig, initial_weights

# Few columns and hidden units: what is compiled grows with both.
SMALL = RuleConfig(hidden=(3,), momentum_decays=(0.9,), factored_decays=(0.99,))
SMALL_BASE = dataclasses.replace(SMALL, orthogonalize=False, vectors="rule")
# With these decays the gradients of the parity tests open the gate at every second step.
GATED = RuleConfig(
    hidden=(3,), momentum_decays=(0.5,), factored_decays=(0.5,), gated=True, overshoot=0.4
)


def make_rule(config: RuleConfig = SMALL, seed: int = 0) -> Rule:
    """An untrained rule whose biases and gate are not zero either."""
    rng = np.random.default_rng(seed)
    weights = initial_weights(config, rng)
    zeros = {k: rng.normal(size=w.shape) for k, w in weights.items() if not w.any()}
    return Rule(config, weights | {k: w.astype(np.float32) for k, w in zeros.items()})
