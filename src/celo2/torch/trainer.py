"""Celo2 for `transformers.Trainer`, which groups parameters without their names."""

from typing import Any

from torch import nn

from celo2.torch.optimizer import Celo2


class TrainerFactory:
    """What Trainer calls with the model as it will be trained, sharded if it is."""

    def __call__(self, model: nn.Module, **settings: Any) -> Celo2:
        """Celo2 for the model; as Trainer has it, vectors have no weight decay."""
        optimizer = Celo2(model, **settings)
        (group,) = optimizer.param_groups
        decays = [param.ndim >= 2 for param in group["params"]]
        vectors = {**_part(group, [not d for d in decays]), "weight_decay": 0.0}
        groups = [_part(group, decays), vectors]
        optimizer.param_groups[:] = [one for one in groups if one["params"]]
        return optimizer


def for_trainer(args: Any = None, **settings: Any) -> tuple[type[TrainerFactory], dict[str, Any]]:
    """What `optimizer_cls_and_kwargs` of `transformers.Trainer` (5 or newer) takes.

    Args:
        args: the TrainingArguments, for `learning_rate` and `weight_decay`; their default rate,
            5e-5, is meant for fine-tuning with AdamW. Their betas are not taken.
        settings: arguments of `Celo2`, before those of `args`.

    Example:
        >>> from celo2.torch.trainer import for_trainer
        >>> for_trainer(lr=5e-4, weight_decay=0.1)[1]
        {'lr': 0.0005, 'weight_decay': 0.1}
    """
    if args is not None:
        settings = {"lr": args.learning_rate, "weight_decay": args.weight_decay} | settings
    return TrainerFactory, settings


def _part(group: dict[str, Any], chosen: list[bool]) -> dict[str, Any]:
    """The group with the chosen parameters only."""
    lists = ("params", "param_names", "routes")
    return group | {
        name: [x for x, c in zip(group[name], chosen, strict=True) if c] for name in lists
    }
