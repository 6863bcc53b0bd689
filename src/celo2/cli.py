"""The `celo2` command: one function per subcommand, its options read from the signature by tyro.

To add a subcommand, add a line to COMMANDS. Whatever it imports, it imports when it runs: `celo2
--help` must not wait for JAX.
"""

import dataclasses
import importlib
import json as jsonlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

import celo2
from celo2 import rulefile, velo
from celo2.rule import CELO2, CELO2_BASE, Form, Norm, Rule, Vectors, feature_rows

PRESETS = {"celo2": CELO2, "celo2-base": CELO2_BASE}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit status: 0, or 2 where the user has to change something.

    CELO2_DEBUG=1, or --debug anywhere, shows the traceback of an error.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or os.environ.get("CELO2_DEBUG", "") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status = _dispatch(arguments)
            sys.stdout.flush()
            return status
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        if debug:
            traceback.print_exc()
        print(f"celo2: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def convert(
    checkpoint: str,
    out: str,
    preset: Literal["celo2", "celo2-base"] = "celo2",
    form: Form | None = None,
    norm: Norm | None = None,
    orthogonalize: bool | None = None,
    vectors: Vectors | None = None,
    rms_decay: float | None = None,
    momentum_decays: tuple[float, ...] | None = None,
    factored_decays: tuple[float, ...] | None = None,
    mlp: str | None = None,
    bank_scale: float | None = None,
    loss_horizon: int | None = None,
) -> None:
    """Turn a published checkpoint of Celo2, Celo or VeLO into a rule file.

    A checkpoint holds only arrays; the options say what else it was trained with.

    Args:
        checkpoint: the authors' file: theta.state, VeLO's params, or VeLO's RNN file in PyTorch.
        out: rule file to write (.safetensors).
        preset: config to start from; --form to --factored-decays override its fields.
        form: formula of the update from direction and magnitude; None: the preset's.
        norm: scaling of the update; None: the preset's.
        orthogonalize: whether the updates of matrices are orthogonalized; None: as in the preset.
        vectors: optimizer of tensors with fewer than two axes; None: the preset's.
        rms_decay: decay of the elementwise second moment; None: the preset's.
        momentum_decays: decays of the momenta; None: the preset's.
        factored_decays: decays of the factored second moments; None: the preset's.
        mlp: the MLP file of VeLO in PyTorch, which has two files.
        bank_scale: factor on VeLO's mixed MLP; None: 100. Checkpoints by Celo's authors need 1.
        loss_horizon: longest time constant of the mean losses of VeLO and Celo, in steps.
            None: the steps of a run. Checkpoints made with use_bugged_loss_features need 10.
    """
    from celo2 import published

    given = {
        "form": form,
        "norm": norm,
        "orthogonalize": orthogonalize,
        "vectors": vectors,
        "rms_decay": rms_decay,
        "momentum_decays": momentum_decays,
        "factored_decays": factored_decays,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    config = dataclasses.replace(PRESETS[preset], **changes)
    of_lstm = {"bank_scale": bank_scale, "loss_horizon": loss_horizon}
    of_lstm = {name: value for name, value in of_lstm.items() if value is not None}
    rule = published.convert(checkpoint, config, mlp=mlp, **of_lstm)
    optimizer = rulefile.optimizer_of(rule)
    if unused := list(of_lstm if optimizer == "celo2" else changes):
        raise ValueError(f"{checkpoint} is a checkpoint of {optimizer}, which has no {unused[0]}.")
    rulefile.save(rule, out)
    made = f"{out}: {_count(rule)} parameters, for {optimizer}"
    print(f"{made}, hidden {rule.config.hidden}, preset {preset}" if optimizer == "celo2" else made)


def info(rule: str, json: bool = False) -> None:
    """Show a rule: config, size, digest, origin, and how much its first layer weighs each feature.

    Rules for VeLO and Celo can be shown too.

    Args:
        rule: a rule file (.safetensors), the name of a shipped rule or an hf:// address.
        json: print one JSON object instead of a table.
    """
    facts = _facts(rulefile.find_rule(rule))
    print(jsonlib.dumps(facts, indent=2) if json else _as_table(facts))


def push(
    rule: str, repo: str, private: bool = False, card: bool = True, file: str = rulefile.HUB_FILE
) -> None:
    """Put a rule on the Hugging Face hub.

    Args:
        rule: a rule file (.safetensors), the name of a shipped rule or an hf:// address.
        repo: repository to write to, user/repo; created if it does not exist.
        private: make a new repository private.
        card: also write a README.md, replacing one that exists.
        file: file name of the rule in the repository.
    """
    chosen = rulefile.find_rule(rule)
    address = rulefile.HUB_PREFIX + repo + ("" if file == rulefile.HUB_FILE else f"/{file}")
    rulefile.parse_address(address)
    files = {file: rulefile.to_bytes(chosen)}
    if card:
        files["README.md"] = rulefile.model_card(chosen, address, rulefile.digest(chosen)).encode()
    rulefile.push(repo, files, private=private)
    print(f'Pushed. Use it with celo2.load("{address}").')


class Command(NamedTuple):
    """A subcommand: a line for the list, and what imports its function."""

    help: str
    load: Callable[[], Callable[..., Any]]
    reads_arguments: bool = False  # itself: its function is given the list of them


def _later(module: str, function: str) -> Callable[[], Callable[..., Any]]:
    """What imports a function of `celo2.commands`, when called."""
    return lambda: getattr(importlib.import_module(f"celo2.commands.{module}"), function)


COMMANDS = {
    "meta-train": Command(
        "meta-train a rule", _later("meta_train", "meta_train"), reads_arguments=True
    ),
    "status": Command("show the progress of a meta-training run", _later("meta_train", "status")),
    "plot": Command("draw a meta-training run or a sweep", _later("evaluate", "plot")),
    "try": Command("try a rule on held-out problems", _later("evaluate", "try_rule")),
    "run": Command("train a task with an optimizer", _later("evaluate", "run")),
    "sweep": Command("compare optimizers as a recipe says", _later("evaluate", "sweep")),
    "report": Command("write the HTML page of a sweep", _later("evaluate", "report")),
    "data": Command(
        "fetch image sets, make token folders", _later("data", "data"), reads_arguments=True
    ),
    "convert": Command("turn a published checkpoint into a rule file", lambda: convert),
    "info": Command("show a rule: its config, size and origin", lambda: info),
    "push": Command("put a rule on the Hugging Face hub", lambda: push),
}


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"celo2 {celo2.__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        raise ValueError(f"{arguments[0]!r} is not a command; there are {', '.join(COMMANDS)}.")
    tyro = rulefile.import_extra("tyro", "cli")
    name, *rest = arguments
    command = COMMANDS[name]
    if command.reads_arguments:
        return command.load()(rest)
    positional = (tyro.conf.PositionalRequiredArgs,)
    status = tyro.cli(command.load(), prog=f"celo2 {name}", args=rest, config=positional)
    return status if isinstance(status, int) else 0


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = (f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return "\n".join(
        (
            "usage: celo2 [--version] [--debug] COMMAND …",
            "",
            *lines,
            "",
            "celo2 COMMAND --help shows a command's options.",
        )
    )


def _show_warning(message, category, filename, lineno, file=None, line=None):
    print(f"celo2: warning: {message}", file=sys.stderr)


def _as_table(facts: dict[str, Any]) -> str:
    lines = []
    for group, value in facts.items():
        if not isinstance(value, dict):
            lines.append(f"{group:<20} {jsonlib.dumps(value)}")
            continue
        lines.append(f"{group}:" if value else f"{group}: none recorded")
        # As JSON, which escapes what the text of an unknown file could do to a terminal.
        lines += (
            f"  {jsonlib.dumps(name)[1:-1]:<18} {jsonlib.dumps(v)}" for name, v in value.items()
        )
    return "\n".join(lines)


def _count(rule: Rule) -> int:
    return sum(np.size(weight) for weight in rule.weights.values())


def _facts(rule: Rule) -> dict[str, Any]:
    return {
        "optimizer": rulefile.optimizer_of(rule),
        "config": dataclasses.asdict(rule.config),
        "parameters": _count(rule),
        "bytes": len(rulefile.to_bytes(rule)),
        "sha256": rulefile.digest(rule),
        "origin": dict(rule.origin),
        "feature_norms": _feature_norms(rule),
    }


def _feature_norms(rule: Rule) -> dict[str, float]:
    """How much the first layer weighs each feature: the norm of its rows, in all banks."""
    rows = feature_rows(velo.MLP if isinstance(rule, velo.VeloRule) else rule.config)
    return {
        name: round(float(np.linalg.norm(rule.weights["w0"][..., at, :])), 4)
        for name, at in rows.items()
    }


if __name__ == "__main__":
    sys.exit(main())
