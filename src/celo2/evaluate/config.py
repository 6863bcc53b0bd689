"""The config of a training run, and the tasks and optimizers that its names refer to."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from celo2.routing import Scale
from celo2.rule import ADAM_MULTIPLIER, check_choices
from celo2.runs.checkpoint import digest_json
from celo2.runs.fields import check_numbers, import_function, replace_fields, to_fields
from celo2.tasks import TaskSpec, task_spec
from celo2.velo import Optimizer as LstmOptimizer

OWN_STEPS = 1000


@lru_cache
def find_task(name: str) -> TaskSpec:
    """The task's entry; `module:function` is a function that makes a Task, or a TaskSpec itself.

    The function is given those of the run's `batch`, `data`, `text` and `remat` that it takes.

    >>> find_task("digits-mlp").steps
    2000
    """
    if ":" not in name:
        return task_spec(name)
    found = import_function(name, "task", "own_task:make")
    if isinstance(found, TaskSpec):
        return found
    if not callable(found):
        raise ValueError(f"task={name!r} is a {type(found).__name__}, not a function or TaskSpec.")
    batch = inspect.signature(found).parameters.get("batch")
    default = None if batch is None or batch.default is inspect.Parameter.empty else batch.default
    return TaskSpec(found, OWN_STEPS, default)


class Variant(NamedTuple):
    """How an optimizer of a run uses a rule.

    Args:
        rule: a shipped name, a file or an hf:// address.
        rms_scale: a factor on the rule's updates.
        adam_multiplier: Adam's rate as a multiple of the rule's; None if Adam updates nothing.
        nesterov: whether Adam has Nesterov's momentum.
        optimizer: the optimizer that the rule is for.
    """

    rule: str
    rms_scale: float = 1.0
    adam_multiplier: float | None = ADAM_MULTIPLIER
    nesterov: bool = True
    optimizer: Literal["celo2"] | LstmOptimizer = "celo2"


VARIANTS = {
    "celo2": Variant("celo2"),
    "celo2-base": Variant("celo2-base", adam_multiplier=None),
    # As in the paper: steps of AdamW's size, and one rate for both.
    "celo2-rms0.2": Variant("celo2", rms_scale=0.2, adam_multiplier=1.0, nesterov=False),
    "celo2-adam": Variant("celo2", nesterov=False),  # with the paper's AdamW
    "celo2-nesterov": Variant("celo2"),  # the name of celo2 in older records
}


def find_variant(optimizer: str) -> Variant | None:
    """How the optimizer uses a rule; None for one without a rule.

    >>> find_variant("celo2-rms0.2").adam_multiplier
    1.0
    >>> find_variant("velo=runs/velo.safetensors").rule
    'runs/velo.safetensors'
    >>> find_variant("adamw") is None
    True
    """
    for name in get_args(LstmOptimizer):
        if optimizer.startswith(f"{name}="):
            file = optimizer.removeprefix(f"{name}=")
            return Variant(file, adam_multiplier=None, optimizer=name)
    if optimizer.endswith(".safetensors") or optimizer.startswith("hf://"):
        return Variant(optimizer)
    return VARIANTS.get(optimizer)


def uses_lstm(optimizer: str) -> bool:
    """Whether it is VeLO or Celo, `velo=FILE` or `celo=FILE`."""
    variant = find_variant(optimizer)
    return variant is not None and variant.optimizer != "celo2"


Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["float32", "bfloat16"]
# Fields that did not exist when older runs were named: at these values they are left out of names.
LATER = {"remat": False, "scale": "rms"}
EVALUATIONS = 10  # in a run, unless evaluate_every says otherwise


@dataclass(frozen=True)
class RunConfig:
    """A training run; equal configs, data and rules make equal records on equal hardware.

    Args:
        task: task to train: a name in celo2.tasks.TASKS, or `module:function`, which makes a
            celo2.tasks.Task.
        optimizer: celo2, celo2-base, celo2-rms0.2, celo2-adam, adamw, muon, sgd or lion; a
            rule file or an hf:// address; velo=FILE or celo=FILE with a rule for VeLO or Celo;
            or `module:function`, called with (schedule, weight_decay).
        label: name of the optimizer in tables; None: its own name.
        learning_rate: peak of the learning-rate schedule; for VeLO and Celo a factor on every
            step (published value: 0.001).
        weight_decay: decoupled weight decay of all parameters, multiplied by the learning rate;
            VeLO and Celo couple it, see celo2.jax.velo.
        steps: number of training steps; None: the task's own.
        batch: examples per step, over all parts of `accumulate`; None: the task's own number.
        accumulate: number of parts in which a batch is computed; their gradients are averaged.
        schedule: course of the learning rate after the warm-up: cosine or linear decay to zero, or
            constant. VeLO and Celo always use constant.
        warmup: length of the warm-up of the learning rate, as a fraction of all updates. VeLO and
            Celo use none.
        clip: maximum global norm of the gradients, which are scaled down to it; None: no clipping.
        adam_multiplier: learning rate of Adam on vectors, embeddings and heads, as a multiple
            of `learning_rate`; None: 5 for rules, 1 for Muon and celo2-rms0.2.
        scale: scaling of a rule's updates: rms gives the updates of all matrices the same RMS;
            spectral multiplies them by √(128 / inputs) and those of output heads by 128 / inputs,
            see celo2.jax.celo2.
        b1: first-moment decay of AdamW and of the Adam beside rules and Muon; momentum of SGD.
        b2: second-moment decay of AdamW and of the Adam beside rules and Muon.
        eps: epsilon of AdamW and of the Adam beside rules and Muon.
        precision: number format of the model's arithmetic; parameters and optimizer stay float32.
        remat: recompute activations in the backward pass to save memory; transformers only.
        seed: random seed of the initial parameters and the order of the data.
        record_every: steps between training records.
        evaluate_every: steps between validations; None: a tenth of all steps.
        evaluation_batches: batches per validation, the same ones in every run.
        text: text of a language model: a name, a text file or a folder of tokens; None: the task's
            own. See celo2.tasks.load_text and celo2.tasks.tokens.
    """

    task: str
    optimizer: str = "celo2"
    label: str | None = None
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    steps: int | None = None
    batch: int | None = None
    accumulate: int = 1
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    clip: float | None = None
    adam_multiplier: float | None = None
    scale: Scale = "rms"
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    precision: Precision = "float32"
    remat: bool = False
    seed: int = 0
    record_every: int = 10
    evaluate_every: int | None = None
    evaluation_batches: int = 16
    text: str | None = None

    def __post_init__(self):
        check_choices(self)
        counts = ("steps", "batch", "accumulate", "record_every", "evaluate_every")
        check_numbers(
            self,
            counts=(*counts, "evaluation_batches"),
            positive=("learning_rate", "clip", "adam_multiplier", "eps"),
            from_zero=("weight_decay",),
            below_one=("warmup", "b1", "b2"),
        )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} must be from 0 to 2³² - 1.")
        if self.batch is not None and self.batch % self.accumulate:
            raise ValueError(
                f"accumulate={self.accumulate} does not divide batch={self.batch}: choose a batch "
                "that is a multiple of it."
            )


def resolve(config: RunConfig) -> RunConfig:
    """The config with the defaults of its task and optimizer in place of None."""
    spec = find_task(config.task)
    steps = config.steps or spec.steps
    variant = find_variant(config.optimizer)
    name = config.optimizer
    if variant is not None and uses_lstm(name):  # has a schedule of its own
        name = variant.optimizer
        config = dataclasses.replace(config, schedule="constant", warmup=0.0)
    return dataclasses.replace(
        config,
        label=config.label or name,
        steps=steps,
        batch=config.batch or spec.batch,
        adam_multiplier=config.adam_multiplier or (variant and variant.adam_multiplier),
        evaluate_every=config.evaluate_every or max(1, steps // EVALUATIONS),
    )


def config_from_fields(fields: Mapping[str, Any]) -> RunConfig:
    """A config from JSON or TOML, checked by type; `task` is needed.

    >>> config_from_fields({"task": "digits-mlp", "learning_rate": 1}).learning_rate
    1.0
    """
    if "task" not in fields:
        raise ValueError("task is missing: name one of celo2.tasks.TASKS.")
    return replace_fields(RunConfig(task=""), fields)


def run_name(config: RunConfig, rule: str | None) -> str:
    """The name of the run's folder: readable, and different for every config and rule.

    `rule` is the SHA-256 of the optimizer's rule, if any: another rule under the same name is
    another run.
    """
    config = resolve(config)
    fields = to_fields(config)
    for name, usual in LATER.items():
        if fields[name] == usual:
            del fields[name]
    digest = digest_json([fields, rule])
    label = str(config.label)
    label = Path(label).stem if "/" in label else label
    parts = (
        config.task,
        label,
        f"lr{config.learning_rate:g}",
        f"wd{config.weight_decay:g}",
        f"seed{config.seed}",
        digest[:8],
    )
    return re.sub(r"[^\w.+-]", "-", "_".join(parts))
