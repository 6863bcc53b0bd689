"""Parameter groups: the route of each parameter, from its module, name and shape."""

import math
import numbers
import re
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from celo2.routing import (
    CONVOLUTION,
    EMBEDDING,
    HEAD,
    OUTPUT_HEAD,
    Explanation,
    Line,
    MatrixView,
    Overrides,
    Route,
    Scale,
    check_overrides,
    default_updater,
    find_override,
    is_broadcast_vector,
    is_vector_name,
    path_names,
    vector_view,
)
from celo2.rule import RuleConfig, check_choice

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# The last layer of torchvision's and transformers' models, if it has no plainer name.
LAST_LAYER = re.compile(r"^(fc|score|qa_outputs|decoder)$")
PEFT = re.compile(r"\.modules_to_save\.\w+$")  # what it puts around a layer that is trained whole
# What spectral_norm, weight_norm and parametrizations call a weight, and weight_norm its lengths.
WEIGHT = re.compile(r"^(weight(_v|_orig)?|original1?)$")
LENGTHS = re.compile(r"(_g|\boriginal0)$")
HIDDEN = "hidden"


class Named(NamedTuple):
    """A parameter with what its module tells.

    `known` is the reason for AdamW to update it, or HIDDEN where its name alone would mislead.
    """

    name: str
    param: Tensor
    view: MatrixView | None = None
    known: str = ""


class Owner(NamedTuple):
    """A module that has a parameter, and the parameter's name in it."""

    module: nn.Module
    name: str


def describe(model: nn.Module, head: nn.Module | None = None) -> list[Named]:
    """Every parameter of a model, once, with its module's matrix view.

    `head` is a layer that is known to be the output. Frozen parameters that no optimizer could
    move, such as quantized weights, are left out.
    """
    owners = _owners(model)
    layers = _known_layers(model) | {id(head): OUTPUT_HEAD}
    found = []
    for name, param in model.named_parameters():
        if not (param.requires_grad or param.dtype.is_floating_point):
            continue
        own = owners[id(param)]
        if any(isinstance(owner.module, EMBEDDINGS) for owner in own):
            known = "embedding"
        else:
            known = "tied" if len(own) > 1 else layers.get(id(own[0].module), "")
        found.append(Named(name, param, _module_view(own[0], param), known))
    return found


def _owners(model: nn.Module) -> dict[int, list[Owner]]:
    """The owners of each parameter, by its id; a parametrized one belongs to the outer module."""
    holders: dict[int, nn.Module] = {}
    for module in filter(parametrize.is_parametrized, model.modules()):
        lists: Any = module.parametrizations
        holders |= {id(one): module for one in lists.values()}
    owners: dict[int, list[Owner]] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            owner = Owner(holders.get(id(module), module), name)
            owners.setdefault(id(param), []).append(owner)
    return owners


def find_head(model: nn.Module, alone: bool) -> nn.Module | None:
    """The layer that is a model's output because a Sequential ends with it.

    A module that is not given `alone` is the last part of a model: a single Linear is the output
    too, but a convolution is not.
    """
    inner = _unwrapped(model)
    ends = isinstance(inner, nn.Sequential if alone else (nn.Sequential, nn.Linear))
    last = _layers_of(inner)[-1:] if ends else []
    return next((layer for layer in last if alone or isinstance(layer, nn.Linear)), None)


def _known_layers(model: nn.Module) -> dict[int, str]:
    """What is known, by id, of layers whose position in the model tells more than their name."""
    known = {}
    layers = _layers_of(model)
    for name, module in model.named_modules():
        own_name = PEFT.sub("", name).split(".")[-1]
        if layers and module is layers[-1] and LAST_LAYER.match(own_name):
            known[id(module)] = OUTPUT_HEAD
        # Of a head that has layers of its own, only the last one is the output.
        if isinstance(module, nn.Sequential) and any(map(HEAD.match, path_names(name)[-1:])):
            known |= {id(layer): HIDDEN for layer in _layers_of(module)[:-1]}
    return known


def _unwrapped(model: nn.Module) -> nn.Module:
    """The outermost module that is a Sequential or has more than one part to train.

    DistributedDataParallel, torch.compile, Lightning and PEFT put modules around a model.
    """
    while not isinstance(model, nn.Sequential):
        parts = [child for child in model.children() if any(True for _ in child.parameters())]
        if len(parts) != 1 or any(True for _ in model.parameters(recurse=False)):
            break
        model = parts[0]
    return model


def _layers_of(module: nn.Module) -> list[nn.Module]:
    kinds = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
    return [m for m in module.modules() if isinstance(m, kinds)]


def _module_view(owner: Owner, param: Tensor) -> MatrixView | None:
    """The matrix view of a module's weight; None where it follows from name and shape alone."""
    module, ndim = owner.module, param.ndim
    if ndim < 2:
        return vector_view(ndim)
    if not WEIGHT.match(owner.name):
        return None
    if isinstance(module, TRANSPOSED):
        return MatrixView((), (0, *range(2, ndim)), (1,))
    if isinstance(module, (nn.Linear, *CONVOLUTIONS, nn.Bilinear)):
        return MatrixView((), tuple(range(1, ndim)), (0,))
    if isinstance(module, EMBEDDINGS) or _is_called("Conv1D", module):
        return MatrixView((), (0,), (1,))  # the latter is how transformers' GPT-2 stores (in, out)
    return None


def _is_called(name: str, module: nn.Module) -> bool:
    """Whether a module is of a class of this name, which FSDP2 may have subclassed."""
    return any(cls.__name__ == name for cls in type(module).__mro__)


def named_view(path: str, ndim: int) -> MatrixView:
    """The matrix view of a Torch weight, from its rank and its path.

    Two axes are a Linear weight (out, in), three a batch of them, four or more (or any called a
    convolution) a kernel (out, in, taps…); tables of embeddings are (in, out). What is called a
    bias or a scale is a vector, or a stack of them.
    """
    if ndim < 2:
        return vector_view(ndim)
    names = path_names(path)
    # A bias is never called b in Torch, but LoRA and state-space models have matrices A and B.
    if is_vector_name(path) and names[-1:] != ["b"]:
        return MatrixView((0,), (), tuple(range(1, ndim)))
    if ndim == 2 and any(EMBEDDING.search(name) for name in names):
        return MatrixView((), (0,), (1,))
    if ndim == 3 and not any(CONVOLUTION.search(name) for name in names):
        return MatrixView((0,), (2,), (1,))
    return MatrixView((), tuple(range(1, ndim)), (0,))


def route(
    named: Named, config: RuleConfig, overrides: Overrides | None = None, published: bool = False
) -> Route:
    """Who updates a parameter, why, and how it is seen as a matrix."""
    shape = tuple(named.param.shape)
    view = named.view or named_view(named.name, len(shape))
    if named.view is None and (is_broadcast_vector(shape) or _is_lengths(named.name, shape)):
        view = vector_view(len(shape))
    if published:
        view = _as_published(view)
    if wish := find_override(named.name, len(shape), view, overrides):
        return wish
    name = "" if named.known == HIDDEN else named.name
    updater, reason = default_updater(name, shape, view, config, published)
    if updater == "rule" and config.vectors == "adam" and named.known not in ("", HIDDEN):
        return Route("adam", named.known, view)
    return Route(updater, reason, view)


def _is_lengths(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the lengths that weight_norm keeps of a weight."""
    return bool(LENGTHS.search(name)) and max(shape, default=1) == math.prod(shape)


def _as_published(view: MatrixView) -> MatrixView:
    """The authors' layout: the last two axes of what JAX would store, (taps…, in, out)."""
    order = (*view.batch, *view.rows[1:], *view.rows[:1], *view.columns)
    if len(order) < 2:
        return view
    return MatrixView(order[:-2], order[-2:-1], order[-1:], published=True)


def find_modules(params: Any) -> Any:
    """The argument of torch's constructor, with modules replaced by their parameters.

    A model that is given alone, or the last of several groups, ends with the output head.
    """
    if isinstance(params, nn.Module):
        params = [{"params": params}]
    if isinstance(params, (Tensor, dict)):
        return params  # torch refuses them
    groups = list(params)
    for i, group in enumerate(groups):
        module = group.get("params") if isinstance(group, dict) else None
        if isinstance(module, nn.Module):
            last = i == len(groups) - 1
            head = find_head(module, alone=len(groups) == 1) if last else None
            groups[i] = group | {"params": _list_module(module, head)}
    return groups


def _list_module(module: nn.Module, head: nn.Module | None = None) -> list[Named]:
    if not (described := describe(module, head)):
        raise ValueError("Celo2 got an empty parameter list: the model has none.")
    return described


def list_params(params: Any) -> list[Named]:
    """The parameters of one group, with what their model or their names tell."""
    if isinstance(params, nn.Module):
        return _list_module(params)
    if isinstance(params, Tensor):
        params = [params]
    if isinstance(params, (set, frozenset)):
        raise TypeError("parameters in a set have no order that lasts: give celo2 a list.")
    found = []
    for param in params:
        if not isinstance(param, Named):
            param = Named(*param[:2]) if isinstance(param, tuple) else Named("", param)
        found.append(param)
    if any(named.name for named in found) and not all(named.name for named in found):
        raise ValueError(
            "all optimizer params should be with/without names. Some param names are missing: "
            f"{sum(not named.name for named in found)} of {len(found)}."
        )
    return found


def check_params(named: list[Named]) -> None:
    """Raises an error for a parameter that celo2 cannot update."""
    for i, (name, param, *_) in enumerate(named):
        name = name or f"parameter {i}"
        if not isinstance(param, Tensor):
            raise TypeError(f"celo2 updates tensors, but {name} is a {type(param).__name__}.")
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} has no shape yet: run the model once, then make Celo2.")
        if not param.is_floating_point() or param.dtype.itemsize < 2:  # torch cannot add float8s
            raise TypeError(
                "celo2 updates real floating-point parameters of 16 bits or more, but "
                f"{name} is {param.dtype}."
            )
        marks = ("_is_flat_param", "_fsdp_flattened")
        flat = type(param).__name__ == "FlatParameter" or any(hasattr(param, m) for m in marks)
        if flat or "_fsdp_wrapped_module" in name:
            raise ValueError(
                f"{name} is flattened by FullyShardedDataParallel: rows and columns are lost. "
                "Use fully_shard (FSDP2), which keeps every tensor's shape."
            )


def check_settings(group: dict[str, Any]) -> None:
    """Raises a ValueError for an invalid setting."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, but it has shape {tuple(lr.shape)}.")
    for name in ("lr", "weight_decay", "rms_scale", "adam_multiplier", "eps"):
        value = group[name]
        if not isinstance(value, (Tensor, numbers.Real)):
            raise ValueError(f"{name}={value!r} must be a number.")
        if not isinstance(value, Tensor) and not float(value) >= 0:
            raise ValueError(f"{name}={value} must not be negative.")
    check_choice("scale", group["scale"], Scale)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(map(_is_decay, betas)):
        raise ValueError(f"betas={betas} must be two numbers in [0, 1).")
    for name in ("momentum_dtype", "newton_schulz_dtype"):
        dtype = group[name]
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{name}={dtype!r} must be a floating-point dtype.")
    space = group["workspace"]
    if space is not None and not (isinstance(space, numbers.Real) and float(space) > 0):
        raise ValueError(f"workspace={space!r} must be a positive number of bytes.")
    if group["kernel"] not in (None, "triton", "eager"):
        raise ValueError(f'kernel={group["kernel"]!r} is not "triton", "eager" or None.')
    if group["updater"] not in (None, "rule", "adam"):
        raise ValueError(f'updater={group["updater"]!r} is not "rule", "adam" or None.')


def _is_decay(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, numbers.Real) and 0 <= float(value) < 1)


def check_names(overrides: Overrides, groups: list[dict[str, Any]]) -> None:
    """Raises a ValueError for overrides that match no parameter."""
    names = [name for group in groups for name in group.get("param_names", ())]
    if overrides and not names:
        raise ValueError(
            "overrides go by name, but Celo2 got parameters without names: pass the model "
            "itself or model.named_parameters()."
        )
    check_overrides(overrides, names)


def route_group(
    named: list[Named],
    config: RuleConfig,
    updater: str | None,
    overrides: Overrides,
    published: bool,
) -> list[tuple]:
    """The routes of a group's parameters, as plain tuples that a state_dict can hold."""
    routes = [route(one, config, overrides, published) for one in named]
    if updater is not None:
        routes = [r._replace(updater=updater, reason="parameter group") for r in routes]
    elif config.vectors == "adam" and any(
        r.updater == "rule" and not one.name for r, one in zip(routes, named, strict=True)
    ):
        warnings.warn(
            "Celo2 got parameters without names and cannot tell embeddings and output heads, "
            "which AdamW should update, from hidden matrices: pass the model itself or "
            "model.named_parameters().",
            stacklevel=5,  # the line that makes the optimizer
        )
    return [(r.updater, r.reason, *r.view) for r in routes]


def unpack_route(packed: tuple) -> Route:
    """The Route in a plain tuple, see `route_group`."""
    updater, reason, batch, rows, columns, published = packed
    view = MatrixView(tuple(batch), tuple(rows), tuple(columns), published)
    return Route(updater, reason, view)


def name_of(group: dict[str, Any], i: int) -> str:
    """The name of a parameter of a group in messages."""
    return group["param_names"][i] if "param_names" in group else f"parameter {i}"


def check_routes(group: dict[str, Any]) -> None:
    """Raises a RuntimeError where somebody has changed the list of a group's parameters."""
    known, found = len(group["routes"]), len(group["params"])
    if known != found:
        raise RuntimeError(
            f"a group was made with {known} parameters and has {found} now: add parameters with "
            "add_param_group, and make a new optimizer to take some away."
        )


def check_gradients(group: dict[str, Any]) -> None:
    """Raises a RuntimeError for a sparse gradient."""
    for i, param in enumerate(group["params"]):
        if param.grad is not None and param.grad.layout is not torch.strided:
            raise RuntimeError(
                f"celo2 takes dense gradients, but {name_of(group, i)}'s is sparse: make its "
                "embedding with sparse=False, or give it to torch.optim.SparseAdam."
            )


def explain_groups(groups: list[dict[str, Any]]) -> Explanation:
    """A line for each parameter: who updates it, why, and how it is seen."""
    lines = Explanation()
    for group in groups:
        check_routes(group)
        for i, (param, packed) in enumerate(zip(group["params"], group["routes"], strict=True)):
            route, shape = unpack_route(packed), tuple(param.shape)
            lines.append(
                Line(name_of(group, i), shape, *route, route.view.shape(shape), param.numel())
            )
    return lines
