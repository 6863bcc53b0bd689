"""The rule as a `torch.optim.Optimizer`, and the checks of a loaded state_dict."""

# pyright: reportPrivateImportUsage=false
# Torch has no public names for its foreach operations.

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from celo2.routing import Explanation, Overrides, Route, Scale, check_patterns, scale_factor
from celo2.rule import ADAM_MULTIPLIER, Rule, RuleConfig, without_idle_units
from celo2.rulefile import as_rule, digest
from celo2.torch.grouping import (
    Member,
    init_adam_state,
    move_by_adam,
    move_by_rule,
    restore_adam_state,
)
from celo2.torch.modules import (
    Params,
    check_gradients,
    check_names,
    check_params,
    check_routes,
    check_settings,
    explain_groups,
    find_modules,
    list_params,
    name_of,
    route_group,
    unpack_route,
)
from celo2.torch.moments import init_moments, momentum_names, small_shapes
from celo2.torch.tensors import Frame, aligned, frame_of, full_precision, local

CPU = torch.device("cpu")
Groups = list[dict[str, Any]]

# Entries of a parameter group that loading a state_dict does not change.
KEPT_ENTRIES = ("rule", "rule_digest", "routes", "published")


class Skipped(NamedTuple):
    """Numbers of gradients that were not finite, over all tensors (or matrices) and steps."""

    rule: int  # matrices that the rule skipped
    adam: int  # tensors of which AdamW treated some elements as zeros


class Celo2(torch.optim.Optimizer):
    """Celo2: the learned rule on hidden matrices; AdamW on vectors, embeddings and the head.

    Pass the model, so that Celo2 knows which is which; `print(optimizer.explain())` shows the
    result. All settings but `overrides` and `compile` can differ between parameter groups, and a
    group may say `updater="rule"` or `"adam"`.

    Args:
        params: a model, its `named_parameters()`, parameters, or a list of parameter groups.
        lr: the RMS of the rule's step; 1e-4 … 1e-3 is usual.
        rule: a Rule, the name of a shipped one, a rule file or an hf:// address.
        weight_decay: decoupled, multiplied by the learning rate of each branch.
        rms_scale: a factor on the rule's updates, 0.2 for the "RMS×0.2" variant.
        scale: "rms" gives the updates of all matrices the same RMS. "spectral" multiplies them by
            √(128 / in), and those of output heads by 128 / in, so that a learning rate tuned on
            a narrow model fits a wide one.
        adam_multiplier: AdamW's rate as a multiple of `lr`, so that schedulers move both.
        betas, eps: AdamW's other settings.
        adam_nesterov: whether AdamW looks ahead with Nesterov's momentum, as beside optax's Muon;
            the paper has False.
        overrides: regex on a parameter's name → "rule", "adam" or a MatrixView; the first that
            matches counts.
        published: follow the authors' code exactly: the last two axes of what JAX would store are
            the matrix, non-finite gradients are used, tensors without gradients drift.
        skip_nonfinite: skip a matrix in a step whose gradient is not finite; AdamW treats such
            elements as zeros. `skipped()` counts both. Default: not `published`.
        hold_unused: do not move a matrix before its first non-zero gradient. Default: as above.
        momentum_dtype: of the stored momenta; bfloat16 makes the state of the shipped `celo2` 8
            bytes per parameter instead of 12.
        newton_schulz_dtype: the precision of the orthogonalization; float32 by default.
        maximize: ascend instead.
        foreach: False updates every tensor by itself; else those of one shape are batched.
        capturable: as torch has it; here every step can be captured in a CUDA graph.
        workspace: bytes for the temporaries of a step, without one tensor's update: 1 GiB by
            default; on a CPU 15/16 of the largest tensor's size, between 1 MiB and 4 MiB.
        kernel: "triton" for fused kernels on matrices, "eager" for torch's operations. Default: the
            former on CUDA, where Triton is installed and nothing is compiled.
        compile: fuse the rule's passes with `torch.compile`, which takes a while at first.

    Example:
        >>> import torch
        >>> from celo2.torch import Celo2
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> optimizer = Celo2(model, lr=5e-4, weight_decay=0.1)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    default_rule = "celo2"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 5e-4,
        *,
        rule: Rule | str | Path | None = None,
        weight_decay: float = 0.0,
        rms_scale: float = 1.0,
        scale: Scale = "rms",
        adam_multiplier: float = ADAM_MULTIPLIER,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adam_nesterov: bool = True,
        overrides: Overrides | None = None,
        published: bool = False,
        skip_nonfinite: bool | None = None,
        hold_unused: bool | None = None,
        momentum_dtype: torch.dtype | None = None,
        newton_schulz_dtype: torch.dtype | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        workspace: int | None = None,
        kernel: str | None = None,
        compile: bool = False,
    ):
        self._rules: dict[str, Rule] = {}
        check_patterns(overrides)
        self._overrides = dict(overrides or {})
        self._compile = compile
        self._weights: dict[tuple[str, torch.device], dict[str, Tensor]] = {}
        defaults = {
            "lr": lr,
            "rule": self._keep(rule or self.default_rule),
            "weight_decay": weight_decay,
            "rms_scale": rms_scale,
            "scale": scale,
            "adam_multiplier": adam_multiplier,
            "betas": betas,
            "eps": eps,
            "adam_nesterov": adam_nesterov,
            "updater": None,
            "published": published,
            "skip_nonfinite": skip_nonfinite,
            "hold_unused": hold_unused,
            "momentum_dtype": momentum_dtype,
            "newton_schulz_dtype": newton_schulz_dtype,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "workspace": workspace,
            "kernel": kernel,
        }
        check_settings(defaults)
        super().__init__(find_modules(params), defaults)
        check_names(self._overrides, self.param_groups)

    def _keep(self, rule: Rule | str | Path) -> str:
        """Loads a rule and returns its name in parameter groups."""
        if isinstance(rule, str) and rule in self._rules:
            return rule
        loaded = as_rule(rule)
        name = digest(loaded) if isinstance(rule, Rule) else str(rule)
        self._rules[name] = loaded
        self._weights[name, CPU] = {
            k: torch.tensor(np.asarray(w, np.float32), device=CPU)
            for k, w in without_idle_units(loaded).weights.items()
        }
        return name

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, whose `params` may be a model too."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group is a dict, not a {type(param_group).__name__}.")
        for name in {"overrides", "compile"} & param_group.keys():
            raise ValueError(f"{name} is for all groups: give it to Celo2 itself.")
        group = {**self.defaults, **param_group}
        for policy in ("skip_nonfinite", "hold_unused"):
            group[policy] = not group["published"] if group[policy] is None else group[policy]
        named = list_params(group["params"])
        check_params(named)
        check_settings(group)
        group["rule"] = self._keep(group["rule"])
        group["rule_digest"] = digest(self._rules[group["rule"]])
        config = self._rules[group["rule"]].config
        group["routes"] = route_group(
            named, config, group["updater"], self._overrides, group["published"]
        )
        if named and named[0].name:
            group["params"] = [(one.name, one.param) for one in named]
        else:
            group["params"] = [one.param for one in named]
        super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure=None):
        """Moves every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_routes(group)
            check_gradients(group)
        for group in self.param_groups:
            # By id: a parameter that is given twice is moved once.
            members: dict[str, dict[int, Member]] = {"rule": {}, "adam": {}}
            for i, param in enumerate(group["params"]):
                if param.grad is not None and param.numel() > 0:
                    route = unpack_route(group["routes"][i])
                    members[route.updater][id(param)] = self._member(group, param, route)
            lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
            move_by_adam(group, lr, list(members["adam"].values()))
            self._move_by_rule(group, lr, list(members["rule"].values()))
        return loss

    def _member(self, group: dict[str, Any], param: Tensor, route: Route) -> Member:
        state, grad = self.state[param], aligned(param.grad, param)
        factor = scale_factor(group["scale"], route, tuple(param.shape))
        if route.updater == "adam":
            if not state:
                state.update(init_adam_state(param))
            return Member(param, grad, state, factor=factor)
        frame = frame_of(param, route.view)
        if not state:
            config = self._rules[group["rule"]].config
            state.update(init_moments(config, frame, param, group["momentum_dtype"]))
        return Member(param, grad, state, frame, factor)

    def _move_by_rule(
        self, group: dict[str, Any], lr: float | Tensor, members: list[Member]
    ) -> None:
        by_device: dict[torch.device, list[Member]] = {}
        for member in members:
            by_device.setdefault(member.param.device, []).append(member)
        config = self._rules[group["rule"]].config
        for device, some in by_device.items():
            weights = self._weights_on(group["rule"], device)
            with full_precision(device):
                move_by_rule(group, lr, config, weights, some, self._compile)

    def _weights_on(self, rule: str, device: torch.device) -> dict[str, Tensor]:
        if (rule, device) not in self._weights:
            weights = self._weights[rule, CPU]
            moved = {k: torch.empty_like(w, device=device) for k, w in weights.items()}
            torch._foreach_copy_(list(moved.values()), list(weights.values()))
            self._weights[rule, device] = moved
        return self._weights[rule, device]

    def skipped(self) -> Skipped:
        """The numbers of gradients so far that were not finite; synchronizes with the device.

        The rule skips such a matrix for the step; AdamW treats such elements as zeros. For a
        sharded parameter, AdamW counts this process's part only.
        """
        counts = {"rule": 0, "adam": 0}
        for state in filter(None, self.state.values()):
            kind = "adam" if "exp_avg" in state else "rule"
            counts[kind] += int(local(state["skipped"]).sum())
        return Skipped(**counts)

    def explain(self) -> Explanation:
        """A printable table of who updates each parameter, why, and how it is seen."""
        return explain_groups(self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but the rule's statistics keep their dtype.

        Groups keep the rule and the routes of this optimizer; a state that does not fit them
        raises an error before anything is changed.
        """
        own = [dict(group) for group in self.param_groups]
        content: dict[str, Any] = {}

        def look(_, loaded: dict[str, Any]) -> None:
            self._check_content(loaded)
            content.update(loaded)

        # The last of the hooks, after the others may have changed the content.
        handle = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        saved = content["param_groups"]
        for group, before, other in zip(self.param_groups, own, saved, strict=True):
            # A state saved by an older version lacks newer settings.
            group.update({k: v for k, v in before.items() if k in KEPT_ENTRIES or k not in group})
            if other.get("rule_digest") != group["rule_digest"]:
                warnings.warn(
                    f"The state was saved with another rule than {group['rule']}, which goes on "
                    "with it.",
                    stacklevel=2,
                )
        # Statistics in their own dtypes, which torch has cast, on their parameter's device.
        for group, i, state in _saved_states(self.param_groups, content):
            param = group["params"][i]
            state = {name: x.to(param.device) for name, x in state.items()}
            is_adam = unpack_route(group["routes"][i]).updater == "adam"
            self.state[param] = restore_adam_state(param, state) if is_adam else state

    def _check_content(self, content: dict[str, Any]) -> None:
        """Raises a ValueError where a state_dict was made with another rule or other routes."""
        sizes, saved_sizes = (
            [len(group["params"]) for group in some]
            for some in (self.param_groups, content["param_groups"])
        )
        if sizes != saved_sizes:
            return  # torch has an error for that
        for group, i, state in _saved_states(self.param_groups, content):
            route, name = unpack_route(group["routes"][i]), name_of(group, i)
            if route.updater == "rule":
                frame = frame_of(group["params"][i], route.view)
                check_state(self._rules[group["rule"]].config, frame, state, name)
            elif "exp_avg" not in state:
                raise ValueError(
                    f"the state of {name} is the rule's, but AdamW updates it here: it was made "
                    "with another routing (see `overrides` and `explain()`)."
                )

    def __getstate__(self) -> dict[str, Any]:
        own = ("_rules", "_overrides", "_compile", "_weights")
        return super().__getstate__() | {name: getattr(self, name) for name in own}


class Celo2Base(Celo2):
    """Celo2-base: the learned rule on every tensor, without orthogonalization.

    Only single-element tensors go to AdamW. Takes the arguments of `Celo2`.

    Example:
        >>> import torch
        >>> from celo2.torch import Celo2Base
        >>> optimizer = Celo2Base(torch.nn.Linear(4, 8), lr=3e-4)
    """

    default_rule = "celo2-base"


def check_state(config: RuleConfig, frame: Frame, state: dict[str, Tensor], name: str) -> None:
    """Raises a ValueError where a loaded state was made with another rule or other views."""
    missing = [key for key in (*momentum_names(config), "rms") if key not in state]
    if missing or f"momentum_{len(config.momentum_decays)}" in state:
        raise ValueError(
            f"the state of {name} has {sum(k.startswith('momentum_') for k in state)} momenta and "
            f"the rule {len(config.momentum_decays)}: it was made with another rule or routing."
        )
    for key, shape in small_shapes(config, frame.axes, frame.extent.shape).items():
        if tuple(state[key].shape) != shape:
            raise ValueError(
                f"the state of {name} has {key} of shape {tuple(state[key].shape)} where {shape} "
                "is needed: it was made with other views (see `overrides` and `published`)."
            )


def _saved_states(
    groups: Groups, content: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], int, dict[str, Tensor]]]:
    """Each parameter's group, its place there and its saved state, where it has one."""
    for group, saved in zip(groups, content["param_groups"], strict=True):
        for i, key in enumerate(saved["params"]):
            if state := content["state"].get(key):
                yield group, i, state
