"""What a parameter is, from the module that holds it, its name and its shape."""

import math
import re
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrize

from celo2.routing import (
    CONVOLUTION,
    EMBEDDING,
    HEAD,
    MatrixView,
    Overrides,
    Route,
    default_updater,
    find_override,
    is_broadcast_vector,
    is_vector_name,
    path_names,
    vector_view,
)
from celo2.rule import RuleConfig

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
    """A parameter with what is known of it.

    `known` is why AdamW must have it, or HIDDEN where its name alone would mislead.
    """

    name: str
    param: Tensor
    view: MatrixView | None = None
    known: str = ""


class Owner(NamedTuple):
    """A module that has a parameter, and its name for it."""

    module: nn.Module
    name: str


def describe(model: nn.Module, head: nn.Module | None = None) -> list[Named]:
    """Every parameter of a model, once, with its module's matrix view.

    `head` is a layer that is known to be the output. Frozen parameters that no optimizer could
    move, such as quantized weights, are left out.
    """
    owners = _owners(model)
    layers = _known_layers(model) | {id(head): "output head"}
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
    """Of each parameter, by its id; what is parametrized belongs to the module it is a part of."""
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
    """What is known, by id, of layers whose place in the model says more than their name."""
    known = {}
    layers = _layers_of(model)
    for name, module in model.named_modules():
        own_name = PEFT.sub("", name).split(".")[-1]
        if layers and module is layers[-1] and LAST_LAYER.match(own_name):
            known[id(module)] = "output head"
        # Of a head that has layers of its own, only the last one is the output.
        if isinstance(module, nn.Sequential) and any(map(HEAD.match, path_names(name)[-1:])):
            known |= {id(layer): HIDDEN for layer in _layers_of(module)[:-1]}
    return known


def _unwrapped(model: nn.Module) -> nn.Module:
    """The first module from outside that is a Sequential or has more than one part to train.

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
    """The matrix view of a module's weight; None where only name and shape can tell."""
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
    """The matrix view of a Torch weight, from its rank and from what its path says it is.

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
    """Whether a tensor is what weight_norm keeps of a weight beside its directions."""
    return bool(LENGTHS.search(name)) and max(shape, default=1) == math.prod(shape)


def _as_published(view: MatrixView) -> MatrixView:
    """The authors' layout: the last two axes of what JAX would store, (taps…, in, out)."""
    order = (*view.batch, *view.rows[1:], *view.rows[:1], *view.columns)
    if len(order) < 2:
        return view
    return MatrixView(order[:-2], order[-2:-1], order[-1:], published=True)
