"""What a parameter is, from the module that holds it, its name and its shape."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from celo2.layout import MatrixView, published_view, vector_view
from celo2.routing import (
    CONVOLUTION,
    EMBEDDING,
    HEAD,
    Overrides,
    Route,
    default_updater,
    find_override,
    is_broadcast_vector,
    path_names,
)
from celo2.rule import RuleConfig

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# The last layer of torchvision's and transformers' models, if it has no plainer name.
LAST_LAYER = re.compile(r"^(fc|score|qa_outputs|decoder)$")
HIDDEN = "hidden"


class Named(NamedTuple):
    """A parameter with what is known of it.

    `known` is why AdamW must have it, or HIDDEN where its name alone would mislead.
    """

    name: str
    param: Tensor
    view: MatrixView | None = None
    known: str = ""


def describe(model: nn.Module) -> list[Named]:
    """Every parameter of a model, once, with its module's matrix view."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), []).append(module)
    layers = {id(layer): known for layer, known in _known_layers(model)}
    found = []
    for name, param in model.named_parameters():
        modules = owners[id(param)]
        if any(isinstance(module, EMBEDDINGS) for module in modules):
            known = "embedding"
        else:
            known = "tied" if len(modules) > 1 else layers.get(id(modules[0]), "")
        found.append(Named(name, param, _module_view(modules[0], param), known))
    return found


def _known_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Layers whose place in the model says more than their name."""
    model = _unwrapped(model)
    layers = _layers_of(model)
    if layers and isinstance(model, nn.Sequential):
        yield layers[-1], "output head"
    for name, child in model.named_children():
        if layers and child is layers[-1] and LAST_LAYER.match(name):
            yield child, "output head"
    for name, module in model.named_modules():
        # Of a head that has layers of its own, only the last one is the output.
        if isinstance(module, nn.Sequential) and any(map(HEAD.match, path_names(name)[-1:])):
            yield from ((layer, HIDDEN) for layer in _layers_of(module)[:-1])


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile."""
    while [name for name, _ in model.named_children()] in (["module"], ["_orig_mod"]):
        model = next(model.children())
    return model


def _layers_of(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(m, (nn.Linear, *CONVOLUTIONS))]


def _module_view(module: nn.Module, param: Tensor) -> MatrixView | None:
    """The matrix view of a module's weight; None where only name and shape can tell."""
    ndim = param.ndim
    if ndim < 2:
        return vector_view(ndim)
    if isinstance(module, TRANSPOSED):
        return MatrixView((), (0, *range(2, ndim)), (1,))
    if isinstance(module, (*CONVOLUTIONS, nn.Bilinear)):
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
    convolution) a kernel (out, in, taps…); tables of embeddings are (in, out).
    """
    if ndim < 2:
        return vector_view(ndim)
    names = path_names(path)
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
    if named.view is None and is_broadcast_vector(shape):
        view = vector_view(len(shape))
    if published:
        view = published_view(len(shape))
    if wish := find_override(named.name, len(shape), view, overrides):
        return wish
    name = "" if named.known == HIDDEN else named.name
    updater, reason = default_updater(name, shape, view, config, published)
    if updater == "rule" and config.vectors == "adam" and named.known not in ("", HIDDEN):
        return Route("adam", named.known, view)
    return Route(updater, reason, view)
