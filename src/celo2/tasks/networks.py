"""The networks of the tasks: MLP, convolution nets, language model and vision transformer.

Each has a function that draws its parameters, a tree of named arrays, and one that computes its
logits from them. CONVNETS, LANGUAGE_MODELS and VISION_TRANSFORMERS list the sizes in use.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

DATA_AXIS = "data"  # of a mesh, along which the examples of a batch are sharded
CHOP = 2.0  # standard deviations at which initial weights are cut

# Layers and losses.
#
# The initialisers are compiled, so that a model's init, called as it is, compiles each shape once.
# A `jit` around the whole init would compile the random draws of every layer anew.


@partial(jax.jit, static_argnums=(1, 2))
def truncated_normal(key: Array, shape: tuple[int, ...], gain: float = 1.0) -> Array:
    """A kernel (…, in, out) from a normal cut at ±2, times gain/√fan_in.

    The cut is not corrected for: the standard deviation is 0.88 · gain/√fan_in.
    """
    fan_in = math.prod(shape[:-1])
    return jax.random.truncated_normal(key, -CHOP, CHOP, shape) * (gain / math.sqrt(fan_in))


@partial(jax.jit, static_argnums=1)
def xavier_uniform(key: Array, shape: tuple[int, int]) -> Array:
    """A kernel (in, out), uniform with variance 2 / (in + out)."""
    bound = math.sqrt(6.0 / sum(shape))
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


@partial(jax.jit, static_argnums=(1, 2))
def normal(key: Array, shape: tuple[int, ...], scale: float) -> Array:
    """A table from a normal of standard deviation `scale`."""
    return jax.random.normal(key, shape) * scale


def init_dense(key: Array, fan_in: int, fan_out: int) -> dict[str, Array]:
    """A truncated-normal kernel and a zero bias."""
    return {"kernel": truncated_normal(key, (fan_in, fan_out)), "bias": jnp.zeros(fan_out)}


def dense(params: dict[str, Array], x: Array) -> Array:
    """`x @ kernel + bias`."""
    return x @ params["kernel"] + along_last_axis(params["bias"], x)


def along_last_axis(vector: Array, x: Array) -> Array:
    """The vector with leading axes of length one, as many as `x` needs."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def rms_norm(x: Array, axes: tuple[int, ...] = (-1,)) -> Array:
    """`x` divided by its root mean square over `axes`."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axes, keepdims=True) + 1e-6)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The mean negative log-likelihood of the labels, in nats."""
    logits = logits.astype(jnp.float32)
    # One-hot, not a gather: the gradient of a gather is a scatter, which is slow on CPUs.
    chosen = jnp.sum(logits * jax.nn.one_hot(labels, logits.shape[-1]), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def accuracy(logits: Array, labels: Array) -> Array:
    """The fraction of rows whose largest logit is the label's."""
    hits = jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels
    return jnp.mean(hits.astype(jnp.float32))


def shard_examples(x: Array) -> Array:
    """`x` with its first axis, the examples, sharded along the data axis of the mesh that is set.

    Without a mesh it is `x`. Otherwise a table sharded along its width would make XLA shard what is
    read from it in the same way, and every device would compute the whole batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if kinds.get(DATA_AXIS) != AxisType.Auto or x.shape[0] % mesh.shape[DATA_AXIS]:
        return x
    rest = [P.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, P(DATA_AXIS, *rest))


def classification_loss(logits: Callable[[dict, Array], Array]) -> Callable:
    """The loss of a classifier: params, (x, y) -> mean cross-entropy, metrics."""

    def loss(params, batch):
        x, y = batch
        scores = logits(params, x)
        value = cross_entropy(scores, y)
        return value, {"loss": value, "accuracy": accuracy(scores, y)}

    return loss


# The multilayer perceptron, for flat inputs.

MLP_SIZES = (64, 32, 10)  # the meta-training problem: 2,410 parameters


def init_mlp(key: Array, sizes: Sequence[int] = MLP_SIZES) -> dict:
    """Layers `layer_0` … and `head`: truncated normal with σ = 1/√fan_in, zero biases."""
    keys = jax.random.split(key, len(sizes) - 1)
    names = [*(f"layer_{i}" for i in range(len(sizes) - 2)), "head"]
    shapes = zip(sizes, sizes[1:], strict=False)
    return {name: init_dense(k, *shape) for name, k, shape in zip(names, keys, shapes, strict=True)}


def mlp_logits(params: dict, x: Array) -> Array:
    """[B, classes] from inputs [B, …], flattened; ReLU between layers."""
    x = x.reshape(len(x), -1)
    for i in range(len(params) - 1):
        x = jax.nn.relu(dense(params[f"layer_{i}"], x))
    return dense(params["head"], x)


# The residual convolution net.


@dataclass(frozen=True)
class ConvConfig:
    """Stages of residual blocks; each stage after the first halves the image."""

    channels: int = 1
    widths: tuple[int, ...] = (16, 32)
    blocks: int = 1  # per stage
    classes: int = 10


CONVNETS = {
    "tiny": ConvConfig(),
    "small": ConvConfig(widths=(32, 64, 128)),
    "resnet": ConvConfig(widths=(64, 128, 256, 512), blocks=2),
}


def init_convnet(key: Array, config: ConvConfig) -> dict:
    """3×3 kernels (3, 3, in, out), `stem`, `stage_i` and `head`."""
    stem_key, head_key, *keys = jax.random.split(key, 2 + len(config.widths))
    params: dict = {"stem": _init_conv(stem_key, config.channels, config.widths[0])}
    width = config.widths[0]
    for i, (stage_key, out) in enumerate(zip(keys, config.widths, strict=True)):
        down_key, *block_keys = jax.random.split(stage_key, 1 + config.blocks)
        stage = {f"block_{j}": _init_residual(k, out) for j, k in enumerate(block_keys)}
        if i > 0:
            stage["down"] = _init_conv(down_key, width, out)
        params[f"stage_{i}"] = stage
        width = out
    params["norm"] = {"scale": jnp.ones(width)}
    return params | {"head": init_dense(head_key, width, config.classes)}


def convnet_logits(params: dict, config: ConvConfig, x: Array) -> Array:
    """[B, classes] from images [B, H, W, channels]."""
    x = _conv(params["stem"], x)
    for i in range(len(config.widths)):
        stage = params[f"stage_{i}"]
        if "down" in stage:
            x = _conv(stage["down"], x, stride=2)
        for j in range(config.blocks):
            x = _residual(stage[f"block_{j}"], x)
    x = jnp.mean(jax.nn.relu(_image_norm(params["norm"], x)), axis=(1, 2))
    return dense(params["head"], x)


def _init_conv(key: Array, fan_in: int, fan_out: int) -> dict:
    # √2: a ReLU passes half of the second moment.
    return {"kernel": truncated_normal(key, (3, 3, fan_in, fan_out), 2**0.5)}


def _init_residual(key: Array, width: int) -> dict:
    keys = jax.random.split(key)
    return {
        f"{part}_{i}": value
        for i, k in enumerate(keys)
        for part, value in (
            ("norm", {"scale": jnp.ones(width)}),
            ("conv", _init_conv(k, width, width)),
        )
    }


def _residual(params: dict, x: Array) -> Array:
    y = x
    for i in range(2):
        y = _conv(params[f"conv_{i}"], jax.nn.relu(_image_norm(params[f"norm_{i}"], y)))
    return x + y


def _conv(params: dict, x: Array, stride: int = 1) -> Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, params["kernel"], (stride, stride), "SAME", dimension_numbers=numbers
    )


def _image_norm(params: dict, x: Array) -> Array:
    # Over the whole image: no running statistics, so a batch's images stay independent.
    return rms_norm(x, (1, 2, 3)) * along_last_axis(params["scale"], x)


# A small convolution net for 8×8 images whose gradient is fast inside a compiled loop on a CPU too.


def init_patch_convnet(key: Array, widths: Sequence[int]) -> dict:
    """Kernels (3, 3, in, out) and biases, `conv_i` and `head`, for strides that leave 2×2."""
    head_key, *keys = jax.random.split(key, 1 + len(widths))
    shapes = zip((1, *widths), widths, strict=False)
    layers = {
        f"conv_{i}": {
            "kernel": truncated_normal(k, (3, 3, *shape), 2**0.5),
            "bias": jnp.zeros(shape[1]),
        }
        for i, (k, shape) in enumerate(zip(keys, shapes, strict=True))
    }
    return layers | {"head": init_dense(head_key, 2 * 2 * widths[-1], 10)}


def patch_convnet_logits(params: dict, x: Array, strides: Sequence[int]) -> Array:
    """[B, classes] from images [B, 8, 8, 1]."""
    for i, stride in enumerate(strides):
        layer = params[f"conv_{i}"]
        x = patch_convolution(layer["kernel"], x, stride)
        x = jax.nn.relu(x + along_last_axis(layer["bias"], x))
    return dense(params["head"], x.reshape(len(x), -1))


def patch_convolution(kernel: Array, x: Array, stride: int) -> Array:
    """A convolution with zeros around the image, as one matrix product over patches.

    XLA's own, differentiated inside a loop on a CPU, takes 17 times as long.
    """
    height, width = (-(-side // stride) for side in x.shape[1:3])
    around = jax.lax.padtype_to_pads(x.shape[1:3], (3, 3), (stride, stride), "SAME")
    x = jnp.pad(x, ((0, 0), *around, (0, 0)))
    taps = [
        x[:, i : i + stride * height : stride, j : j + stride * width : stride][:, :height, :width]
        for i in range(3)
        for j in range(3)
    ]
    patches = jnp.concatenate(taps, axis=-1)  # [B, H, W, 9·in]
    flat = patches.reshape(-1, patches.shape[-1]) @ kernel.reshape(-1, kernel.shape[-1])
    return flat.reshape(*patches.shape[:-1], kernel.shape[-1])


# Transformers: pre-norm blocks. Norms have no learned scale and layers no bias, so that every
# parameter of a block is a matrix.

EXPANSION = 4  # F / D
LONGEST_WAVE = 10_000.0  # of the rotary position code, over 2π tokens


def check_heads(width: int, head_width: int) -> None:
    """Raises a ValueError unless heads of an even width fill the model's width."""
    if width % head_width or head_width % 2:
        raise ValueError(
            f"head_width={head_width} must be even and divide width={width} without remainder."
        )


def init_block(key: Array, width: int) -> dict:
    """Xavier-uniform kernels: q, k, v, o are (D, D) with heads side by side, up (D, 4D), down."""
    keys = jax.random.split(key, 6)
    inner = EXPANSION * width
    attention = {
        name: {"kernel": xavier_uniform(k, (width, width))}
        for name, k in zip("qkvo", keys, strict=False)
    }
    mlp = {
        "up": {"kernel": xavier_uniform(keys[4], (width, inner))},
        "down": {"kernel": xavier_uniform(keys[5], (inner, width))},
    }
    return {"attention": attention, "mlp": mlp}


def init_blocks(key: Array, width: int, layers: int) -> dict:
    """`block_0` … `block_{layers-1}`."""
    return {f"block_{i}": init_block(k, width) for i, k in enumerate(jax.random.split(key, layers))}


def apply_blocks(
    params: dict, x: Array, head_width: int, *, causal: bool, remat: bool = False
) -> Array:
    """The residual stream [B, T, D] after all blocks.

    Causal attention uses rotary positions; otherwise positions must be in `x`. With `remat` only
    the stream between blocks is kept for the backward pass, which recomputes the rest.
    """

    def apply_block(block: dict, x: Array) -> Array:
        x = x + attention(block["attention"], rms_norm(x), head_width, causal=causal)
        return x + feed_forward(block["mlp"], rms_norm(x))

    if remat:
        apply_block = jax.checkpoint(apply_block)
    x = shard_examples(x)
    for i in range(len(params)):
        x = shard_examples(apply_block(params[f"block_{i}"], x))
    return x


def attention(params: dict, x: Array, head_width: int, *, causal: bool) -> Array:
    """Multi-head attention with normalised queries and keys."""
    batch, length, width = x.shape
    heads = (batch, length, width // head_width, head_width)
    q, k, v = ((x @ params[name]["kernel"]).reshape(heads) for name in "qkv")  # [B, T, N, H]
    q, k = rms_norm(q), rms_norm(k)
    if causal:
        q, k = rotate(q), rotate(k)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=causal)  # [B, T, N, H]
    return mixed.reshape(x.shape) @ params["o"]["kernel"]


def rotate(x: Array) -> Array:
    """Rotary positions: turns each pair of channels of [B, T, N, H] by an angle growing with T."""
    half = x.shape[-1] // 2
    # Angles in float32: bfloat16 has no number for most positions above 256.
    waves = LONGEST_WAVE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), waves)[None, :, None, :]
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def feed_forward(params: dict, x: Array) -> Array:
    """Two layers with a GELU between them."""
    return jax.nn.gelu(x @ params["up"]["kernel"]) @ params["down"]["kernel"]


# The language model: a decoder.

GPT2_VOCAB = 50_304  # the 50,257 tokens of GPT-2, rounded up
GATHERED = ("embed.table",)  # parameters read by index: see Task


@dataclass(frozen=True)
class LMConfig:
    """A size of the language model; the paper's letters are D, L, H, T."""

    width: int
    layers: int
    head_width: int
    length: int
    vocab: int = 256
    remat: bool = False  # compute a block's activations again rather than keep them

    def __post_init__(self):
        check_heads(self.width, self.head_width)


LANGUAGE_MODELS = {
    "tiny": LMConfig(64, 2, 32, 64),
    "0.3m": LMConfig(64, 6, 32, 128),
    "0.8m": LMConfig(128, 4, 64, 128),
    "1m": LMConfig(128, 5, 64, 128),
    "3m": LMConfig(192, 6, 64, 256),
    "10m": LMConfig(320, 8, 64, 256),
    # Of one depth, to see what changes with the width.
    **{f"width-{width}": LMConfig(width, 3, 32, 64) for width in (64, 128, 256, 512)},
    # The paper's three.
    "lm30m": LMConfig(384, 6, 128, 512, GPT2_VOCAB),
    "gpt2": LMConfig(768, 12, 128, 1024, GPT2_VOCAB),
    "gpt3xl": LMConfig(2048, 24, 128, 2048, GPT2_VOCAB),
}


def init_lm(key: Array, config: LMConfig) -> dict:
    """`embed`, `blocks` and an untied `lm_head`; both tables normal with σ = 1/√D."""
    embed_key, blocks_key, head_key = jax.random.split(key, 3)
    shape, scale = (config.vocab, config.width), 1 / math.sqrt(config.width)
    return {
        "embed": {"table": normal(embed_key, shape, scale)},
        "blocks": init_blocks(blocks_key, config.width, config.layers),
        "lm_head": {"kernel": normal(head_key, shape[::-1], scale)},
    }


def lm_logits(params: dict, config: LMConfig, tokens: Array) -> Array:
    """[B, T, vocab]: at each place, the next token's logits."""
    x = params["embed"]["table"][tokens]  # [B, T, D]
    x = x.astype(params["lm_head"]["kernel"].dtype)
    x = apply_blocks(params["blocks"], x, config.head_width, causal=True, remat=config.remat)
    return rms_norm(x) @ params["lm_head"]["kernel"]


def lm_loss(config: LMConfig, params: dict, tokens: Array) -> tuple[Array, dict[str, Array]]:
    """The mean negative log-likelihood of each next token in nats, and the metrics."""
    value = cross_entropy(lm_logits(params, config, tokens[:, :-1]), tokens[:, 1:])
    return value, {"loss": value}


# The vision transformer, a classifier.


@dataclass(frozen=True)
class ViTConfig:
    """A size of the vision transformer, for square images."""

    side: int = 8
    channels: int = 1
    patch: int = 2
    width: int = 64
    layers: int = 2
    head_width: int = 32
    classes: int = 10
    remat: bool = False  # compute a block's activations again rather than keep them

    def __post_init__(self):
        check_heads(self.width, self.head_width)
        if self.side % self.patch:
            raise ValueError(f"patch={self.patch} must divide side={self.side} without remainder.")

    @property
    def patches(self) -> int:
        return (self.side // self.patch) ** 2


VISION_TRANSFORMERS = {
    "tiny": ViTConfig(),
    "0.1m": ViTConfig(side=32, channels=3, patch=4),
    "small": ViTConfig(side=32, channels=3, patch=4, width=64, layers=4),
    "cifar": ViTConfig(side=32, channels=3, patch=4, width=192, layers=6, head_width=64),
    "b16": ViTConfig(256, 3, 16, width=768, layers=12, head_width=64, classes=1000),
}


def init_vit(key: Array, config: ViTConfig) -> dict:
    """`patch_embed`, a learned `position` table, `blocks` and `head`."""
    embed_key, position_key, blocks_key, head_key = jax.random.split(key, 4)
    pixels = config.patch**2 * config.channels
    position = normal(position_key, (config.patches, config.width), 0.02)
    return {
        "patch_embed": init_dense(embed_key, pixels, config.width),
        "position": {"table": position},
        "blocks": init_blocks(blocks_key, config.width, config.layers),
        "head": init_dense(head_key, config.width, config.classes),
    }


def vit_logits(params: dict, config: ViTConfig, images: Array) -> Array:
    """[B, classes] from images [B, side, side, channels], by the mean of the last tokens."""
    x = dense(params["patch_embed"], split_patches(images, config.patch))
    x = x + params["position"]["table"][None]
    x = apply_blocks(params["blocks"], x, config.head_width, causal=False, remat=config.remat)
    return dense(params["head"], jnp.mean(rms_norm(x), axis=1))


def split_patches(images: Array, patch: int) -> Array:
    """[B, patches, patch · patch · channels], patches in reading order."""
    batch, height, width, channels = images.shape
    rows, columns = height // patch, width // patch
    x = images.reshape(batch, rows, patch, columns, patch, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, -1)
