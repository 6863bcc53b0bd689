"""Small rules, shared by the tests of both frameworks."""

import dataclasses

import numpy as np

from celo2.rule import Rule, RuleConfig, initial_weights

# Few columns and hidden units: what is compiled grows with both.
SMALL = RuleConfig(hidden=(3,), momentum_decays=(0.9,), factored_decays=(0.99,))
SMALL_BASE = dataclasses.replace(SMALL, orthogonalize=False, vectors="rule")


def make_rule(config: RuleConfig = SMALL, seed: int = 0) -> Rule:
    """An untrained rule whose biases are not zero either."""
    rng = np.random.default_rng(seed)
    weights = initial_weights(config, rng)
    biases = {k: rng.normal(size=w.shape) for k, w in weights.items() if k.startswith("b")}
    return Rule(config, weights | {k: b.astype(np.float32) for k, b in biases.items()})
