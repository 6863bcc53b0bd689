"""Rules for VeLO and Celo: golden ones, random ones, and as the authors pack them."""

import msgpack
import numpy as np

from celo2.rule import FEATURES, feature_rows
from celo2.velo import CELO, MLP, VELO, VeloConfig, VeloRule, velo_shapes
from rule_files import pack

SMALL = {
    "velo": VeloConfig("velo", lstm=8, banks=3),
    "celo": VeloConfig("celo", lstm=8, banks=1, bank_scale=1.0),
}
OFFICIAL = {"velo": VELO, "celo": CELO}
# The published tree's paths, joined by |, without those of the MLP.
PATHS = {
    "lstm.hidden": "lstm_init_state|hidden",
    "lstm.cell": "lstm_init_state|cell",
    **{
        f"{ours}.{part}": f"rnn_params|{theirs}|{part}"
        for ours, theirs in {
            "linear": "linear",
            "linear_1": "linear_1",
            "linear_2": "linear_2",
            "lstm": "rnn/linear",
            "controls": "rnn_to_controls",
            "step_size": "step_size",
        }.items()
        for part in ("w", "b")
    },
}
MLP_PATH = "ff_mod_stack|~|"


def random_rule(config: VeloConfig, seed: int = 0) -> VeloRule:
    """A rule of which no array is zero."""
    rng = np.random.default_rng(seed)
    shapes = velo_shapes(config)
    return VeloRule(config, {k: draw(rng, s) for k, s in shapes.items()})


def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.normal(0, 0.4 if len(shape) > 1 else 0.2, shape).astype(np.float32)


def golden_rule(config: VeloConfig, arrays, name: str) -> VeloRule:
    """The weights called `name` in a golden file."""
    flat = {k.split("/", 2)[2]: v for k, v in arrays.items() if k.startswith(f"theta/{name}/")}
    weights = {ours: flat[theirs] for ours, theirs in PATHS.items()}
    blocks = [flat[f"{MLP_PATH}w0__{i}"] for i in range(len(FEATURES))]
    weights["w0"] = np.concatenate(blocks, 1)
    weights |= {k: flat[MLP_PATH + k] for k in ("b0", "w1", "b1", "w2", "b2")}
    return VeloRule(config, weights)


def published_tree(rule: VeloRule) -> dict:
    """The rule as nested dicts, as the authors have it."""
    flat = {theirs: rule.weights[ours] for ours, theirs in PATHS.items()}
    for i, rows in enumerate(feature_rows(MLP).values()):
        flat[f"{MLP_PATH}w0__{i}"] = rule.weights["w0"][:, rows]
    flat |= {MLP_PATH + k: rule.weights[k] for k in ("b0", "w1", "b1", "w2", "b2")}
    tree: dict = {}
    for path, array in flat.items():
        *folders, name = path.split("|")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = array
    return tree


def packed(tree: dict) -> bytes:
    return msgpack.packb(tree, default=pack)
