"""The names under which a shipped rule is compared, and how each is used."""

from typing import NamedTuple

from celo2.rule import ADAM_MULTIPLIER


class Variant(NamedTuple):
    """A rule, the factor on its updates, and the Adam beside it.

    `adam_multiplier` is Adam's rate as a multiple of the rule's; None where nothing is left to it.
    """

    rule: str
    rms_scale: float = 1.0
    adam_multiplier: float | None = ADAM_MULTIPLIER
    nesterov: bool = False


VARIANTS = {
    "celo2": Variant("celo2"),
    "celo2-base": Variant("celo2-base", adam_multiplier=None),
    # The paper's: steps of AdamW's size, and one rate for both.
    "celo2-rms0.2": Variant("celo2", rms_scale=0.2, adam_multiplier=1.0),
    "celo2-nesterov": Variant("celo2", nesterov=True),  # the Adam that optax's Muon has
}


def find_variant(optimizer: str) -> Variant | None:
    """How the optimizer uses a rule, be it a shipped one or a file; None for other optimizers.

    >>> find_variant("celo2-rms0.2").adam_multiplier
    1.0
    >>> find_variant("adamw") is None
    True
    """
    if optimizer.endswith(".safetensors") or optimizer.startswith("hf://"):
        return Variant(optimizer)
    return VARIANTS.get(optimizer)


def shared_name(optimizer: str) -> str:
    """One name for all optimizers that differ in nothing but their rule.

    >>> shared_name("celo2") == shared_name("runs/mine/rule.safetensors")
    True
    """
    variant = find_variant(optimizer)
    plain = variant is not None and variant._replace(rule="") == Variant("")
    return "any.safetensors" if plain else optimizer
