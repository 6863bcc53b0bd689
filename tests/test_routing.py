"""Matrix views, who updates a tensor and why."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import given
from hypothesis import strategies as st

import reference
import reference_parts
from celo2.jax.optimizer import from_view, leaf_paths, route_all, to_view
from celo2.routing import (
    MatrixView,
    as_view,
    check_overrides,
    check_view,
    default_view,
    factored_axes,
    path_names,
    published_view,
    route,
)
from celo2.rule import CELO2, CELO2_BASE
from celo2.tasks import networks


@pytest.mark.parametrize(
    ("stored", "default", "published"),
    [
        ((), (1, 1), (1, 1)),
        ((7,), (1, 7), (1, 7)),
        ((4, 6), (4, 6), (4, 6)),
        ((2, 4, 6), (2, 4, 6), (2, 4, 6)),
        ((3, 3, 4, 8), (36, 8), (3, 3, 4, 8)),
        ((2, 3, 3, 4, 8), (72, 8), (2, 3, 3, 4, 8)),
    ],
)
def test_views_of_a_kernel(stored, default, published):
    assert default_view(len(stored)).shape(stored) == default
    assert published_view(len(stored)).shape(stored) == published


@pytest.mark.parametrize(
    ("shape", "axes", "published"),
    [
        ((5, 3), (-1, -2), (-1, -2)),
        ((3, 5), (-2, -1), (-2, -1)),
        ((4, 4), (-2, -1), (-2, -1)),
        ((1, 9), (-2, -1), (-2, -1)),
        ((9, 5, 3), (-1, -2), (-2, -3)),
        ((2, 6, 10), (-2, -1), (-2, -1)),
        ((3, 3, 3), (-2, -1), (-2, -1)),
        ((8, 3, 3, 8), (-2, -1), (-4, -1)),
    ],
)
def test_factored_axes_are_the_two_largest(shape, axes, published):
    assert factored_axes(shape) == axes
    assert factored_axes(shape, published=True) == published


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.booleans())
def test_factored_axes_equal_the_reference_s(shape, published):
    ours = factored_axes(tuple(shape), published)
    assert tuple(axis + len(shape) for axis in ours) == reference.factored_axes(shape, published)


@st.composite
def views(draw):
    """A stored shape and some view of it."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    i, j = sorted((draw(st.integers(0, len(shape))), draw(st.integers(0, len(shape)))))
    return shape, MatrixView(tuple(order[:i]), tuple(order[i:j]), tuple(order[j:]))


@given(views())
def test_from_view_undoes_to_view(drawn):
    shape, view = drawn
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    viewed = to_view(jnp.asarray(x), view)
    assert viewed.shape == view.shape(shape)
    if not view.is_vector:
        np.testing.assert_array_equal(viewed, reference_parts.view(x, view))
    np.testing.assert_array_equal(from_view(viewed, view, shape), x)


def test_vector_is_a_single_row():
    assert MatrixView((0,), (), (1,)).is_vector
    assert MatrixView((0,), (), (1,)).shape((3, 7)) == (3, 1, 7)
    assert default_view(1).is_vector and not default_view(2).is_vector


@pytest.mark.parametrize(
    "view",
    [
        MatrixView((), (0,), (1,)),
        MatrixView((0,), (0,), (1, 2)),
        MatrixView((), (0, 1), (3,)),
        MatrixView((), (0, 1), (-1,)),
    ],
)
def test_view_must_name_every_axis_once(view):
    with pytest.raises(ValueError, match="tensor of 3 axes.* name each of 0…2 once"):
        check_view(view, 3)
    check_view(MatrixView((1,), (2,), (0,)), 3)


def routes(tree, config=CELO2, **options) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Path → (updater, viewed shape)."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(tree)]
    ways = route_all(tree, config, **options)
    return {
        path: (way.updater, way.view.shape(shape))
        for path, shape, way in zip(leaf_paths(tree), shapes, ways, strict=True)
    }


# Paths of flax models on the Hugging Face hub, of haiku, of Torch modules.
RULE = {
    "encoder/layer/0/attention/output/dense/kernel": (8, 8),
    "bert/encoder/layer/11/attention/self/query/kernel": (8, 8),
    "encoder/layer/0/intermediate/dense/kernel": (8, 32),
    "encoder/layer/0/output/dense/kernel": (32, 8),
    "transformer/h/0/attn/c_attn/kernel": (24, 8),
    "transformer/h/0/mlp/c_proj/kernel": (32, 8),
    "params/decoder/block/0/layer/1/EncDecAttention/o/kernel": (8, 8),
    "model/layers/0/self_attn/o_proj/kernel": (8, 8),
    "model/layers/0/mlp/gate_proj/kernel": (8, 32),
    "mlp/~/linear_0/w": (64, 32),
    "transformer/h0_attn/multi_head_attention/query/w": (8, 8),
    "layers.0.self_attn.out_proj.weight": (8, 8),
    "blocks/3/output_gate/kernel": (8, 8),
    "Dense_0/kernel": (8, 8),
    "0/w": (8, 8),
    "header_norm/kernel": (8, 8),
    "encoder/position_wise_ffn/w_1/kernel": (8, 32),
    "lora/b": (4, 8),
    "distilbert/pre_classifier/kernel": (8, 8),
    "MultiHead_0/Head_0/key/kernel": (8, 4),
}
ADAM = {
    "embedding": {
        "transformer/wte/embedding": (50, 8),
        "transformer/wpe/embedding": (16, 8),
        "bert/embeddings/word_embeddings/embedding": (50, 8),
        "bert/embeddings/position_embeddings/embedding": (16, 8),
        "model/embed_tokens/embedding": (50, 8),
        "encoder/block/0/layer/0/SelfAttention/relative_attention_bias/embedding": (32, 4),
        "vit/pos_embedding": (1, 17, 8),
        "encoder/pos": (1, 17, 8),
        "pos_enc": (17, 8),
        "tok_emb/table": (50, 8),
        "position/table": (16, 8),
        "positional_encoding": (16, 8),
        "position_ids": (1, 16),
        "layers.0.attn.relative_position_bias_table": (16, 3),
        "blocks.0.attn.rel_pos_h": (27, 8),
        "reg_token": (1, 4, 8),
        "query_tokens": (1, 32, 8),
        "language_model/embedder/input_embedding": (50, 8),
    },
    "output head": {
        "lm_head/kernel": (8, 50),
        "params/lm_head/kernel": (8, 50),
        "classifier/kernel": (8, 10),
        "model.lm_head.weight": (50, 8),
        "mlm_head/kernel": (8, 50),
        "unembed/kernel": (8, 50),
        "unembedding": (8, 50),
        "decoder/logits_dense/kernel": (8, 50),
        "value_head/kernel": (8, 3),
        "LMHead_0/Dense_0/kernel": (8, 50),
        "backbone.aux_classifier.weight": (21, 8),
        "head_dist.weight": (10, 8),
        "cls/seq_relationship/kernel": (8, 2),
        "params/output/kernel": (8, 10),
        "out/w": (8, 10),
    },
    "vector": {
        "encoder/layer/0/LayerNorm/scale": (8,),
        "linear/b": (8,),
        "vit/embeddings/cls_token": (1, 1, 8),  # shaped to be broadcast
        "convnext/layer_scale_parameter": (1, 1, 1, 8),
        "blocks/bias": (6, 8),  # stacked layers
        "attention/query/bias": (2, 4),
        "norm/scale": (6, 8),
        "ScanBlock_0/attention/query/bias": (6, 2, 4),
        "blocks/norm/weight": (6, 8),  # equinox, stacked
        "layer_stack/layer_norm/offset": (6, 8),
        "mlp.experts.gate_up_proj_bias": (4, 8),
    },
    "single element": {"temperature": (), "logit_scale": (1,), "gain": (1, 1)},
    "empty": {"unused": (0, 8), "nothing": (0,)},
}


@pytest.mark.parametrize("path", RULE)
def test_hidden_matrix_goes_to_the_rule(path):
    way = route(path, RULE[path], CELO2)
    assert (way.updater, way.reason) == ("rule", "matrix")
    assert way.view.shape(RULE[path]) == RULE[path]


@pytest.mark.parametrize(
    ("path", "shape", "reason"),
    [(path, shape, reason) for reason, paths in ADAM.items() for path, shape in paths.items()],
)
def test_embedding_head_and_vector_go_to_adam(path, shape, reason):
    way = route(path, shape, CELO2)
    assert (way.updater, way.reason) == ("adam", reason)


@pytest.mark.parametrize("reason", ["embedding", "output head", "vector"])
def test_base_takes_all_that_has_more_than_one_element(reason):
    for path, shape in ADAM[reason].items():
        assert route(path, shape, CELO2_BASE).updater == "rule", path
    for path, shape in (ADAM["single element"] | ADAM["empty"]).items():
        assert route(path, shape, CELO2_BASE).updater == "adam", path


def test_published_base_takes_single_elements_too():
    assert route("temperature", (), CELO2_BASE, published=True).updater == "rule"
    assert route("temperature", (), CELO2, published=True).updater == "adam"


@pytest.mark.parametrize(
    ("path", "shape", "viewed"),
    [
        ("stem/kernel", (3, 3, 4, 8), (36, 8)),
        ("video/conv/kernel", (2, 3, 3, 4, 8), (72, 8)),
        ("conv1_d/w", (3, 4, 8), (12, 8)),
        ("Conv_0/kernel", (3, 4, 8), (12, 8)),
        ("experts/kernel", (5, 4, 8), (5, 4, 8)),
        ("layers/mlp/up", (6, 8, 32), (6, 8, 32)),
        ("attention/query/kernel", (8, 2, 4), (8, 8)),
        ("attention/value/kernel", (8, 2, 4), (8, 8)),
        ("attention/value", (8, 2, 4), (8, 8)),
        ("self_attn/k_proj/kernel", (8, 2, 4), (8, 8)),
        ("attention/out/kernel", (2, 4, 8), (8, 8)),
        ("attn/o_proj/kernel", (2, 4, 8), (8, 8)),
        ("layers/attention/query/kernel", (6, 8, 2, 4), (6, 8, 8)),
        ("layers/attention/out/kernel", (6, 2, 4, 8), (6, 8, 8)),
        ("mixer/out/kernel", (2, 4, 8), (2, 4, 8)),  # no attention: a batch
        ("blocks/bias", (6, 8), (6, 1, 8)),
        ("blocks/attention/query/bias", (6, 2, 4), (6, 1, 8)),
        ("attn/q_einsum/w", (8, 23, 4), (23, 32)),  # gemma
        ("attn/kv_einsum/w", (2, 1, 23, 4), (2, 23, 4)),
        ("attn/qkv_einsum/w", (3, 8, 23, 4), (3, 23, 32)),
        ("attn/attn_vec_einsum/w", (8, 4, 23), (32, 23)),
        ("attention/qkv/kernel", (8, 3, 2, 4), (8, 24)),  # DenseGeneral((3, heads, width))
        ("layers/attention/qkv/kernel", (6, 8, 3, 2, 4), (6, 8, 24)),
        ("blocks/0/mha/out/kernel", (2, 4, 8), (8, 8)),
        ("mid/attn_1/q/kernel", (1, 1, 8, 8), (8, 8)),  # attention by 1×1 convolutions
        ("conv/weight", (32, 3, 5, 5), (75, 32)),  # equinox
        ("Conv1d/weight", (32, 3, 5), (15, 32)),
    ],
)
def test_view_follows_rank_and_name(path, shape, viewed):
    assert route(path, shape, CELO2_BASE).view.shape(shape) == viewed


@pytest.mark.parametrize("shape", [(4, 8), (5, 4, 8), (3, 3, 4, 8)])
def test_published_view_knows_no_names(shape):
    for path in ("attention/query/kernel", "conv/kernel", "bias"):
        assert route(path, shape, CELO2, published=True).view == published_view(len(shape))


def test_linen_transformer_is_routed_as_expected():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            x = linen.Embed(9, 8, name="embed")(tokens)
            x = x + linen.MultiHeadDotProductAttention(2, name="attention")(x)
            x = linen.Dense(16, name="up")(linen.LayerNorm()(x))
            return linen.Dense(9, name="head")(linen.Dense(8)(x))

    params = jax.eval_shape(Block().init, jax.random.key(0), jnp.zeros((1, 3), int))
    found = routes(params)
    rule = {path for path, (updater, _) in found.items() if updater == "rule"}
    attention = {f"params/attention/{name}/kernel" for name in ("query", "key", "value", "out")}
    assert rule == attention | {"params/up/kernel", "params/Dense_0/kernel"}
    assert all(found[path] == ("rule", (8, 8)) for path in attention)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(9, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs)])
        self.conv = nnx.Conv(3, 4, (3,), rngs=rngs)
        self.lm_head = nnx.Linear(8, 9, rngs=rngs)
        self.table = nnx.Param(jnp.ones((4, 8)))


def test_nnx_state_is_routed_as_expected():
    found = routes(nnx.state(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0))), nnx.Param))
    rule = {path: viewed for path, (updater, viewed) in found.items() if updater == "rule"}
    attention = dict.fromkeys(
        (f"attention/{name}/kernel" for name in ("query", "key", "value", "out")), (8, 8)
    )
    assert rule == attention | {"layers/0/kernel": (8, 8), "conv/kernel": (9, 4), "table": (4, 8)}


@pytest.mark.parametrize(
    ("init", "config", "adam"),
    [
        (networks.init_lm, networks.LANGUAGE_MODELS["tiny"], {"embed/table", "lm_head/kernel"}),
        (
            networks.init_vit,
            networks.VISION_TRANSFORMERS["tiny"],
            {f"{name}/{kind}" for name in ("patch_embed", "head") for kind in ("kernel", "bias")}
            | {"position/table"},
        ),
        (
            networks.init_convnet,
            networks.CONVNETS["tiny"],
            {"head/kernel", "head/bias", "norm/scale"},
        ),
    ],
)
def test_our_own_models_are_routed_as_expected(init, config, adam):
    params = jax.eval_shape(lambda key: init(key, config), jax.random.key(0))
    found = routes(params)
    assert adam <= {path for path, (updater, _) in found.items() if updater == "adam"}
    for path, (updater, viewed) in found.items():
        if path not in adam and "norm" not in path:
            assert updater == "rule" and len(viewed) == 2, path


def test_names_leave_out_wrappers_and_indices():
    assert path_names("params/Layers/0/Kernel") == ["layers", "kernel"]
    assert path_names("_orig_mod.module.blocks.3.weight") == ["blocks", "weight"]
    assert path_names("attention/value/kernel") == ["attention", "value", "kernel"]


def test_other_config_fields_do_not_route():
    config = dataclasses.replace(CELO2, orthogonalize=False, form="d_exp_m")
    assert route("embed", (4, 8), config) == route("embed", (4, 8), CELO2)


def test_first_override_that_matches_counts():
    view = MatrixView((), (1,), (0,))
    overrides = {r"^a/kernel$": "adam", "kernel": view, "embed": "rule"}
    assert route("a/kernel", (4, 8), CELO2, overrides).updater == "adam"
    assert route("b/kernel", (4, 8), CELO2, overrides) == ("rule", "override 'kernel'", view)
    assert route("embed", (4, 8), CELO2, overrides)[:2] == ("rule", "override 'embed'")
    assert route("other", (4, 8), CELO2, overrides).reason == "matrix"


@pytest.mark.parametrize(
    ("wish", "ndim", "view"),
    [
        (optax.contrib.MuonDimensionNumbers(), 2, MatrixView((), (0,), (1,))),
        (optax.contrib.MuonDimensionNumbers(1, 0), 2, MatrixView((), (1,), (0,))),
        (optax.contrib.MuonDimensionNumbers(-2, -1), 3, MatrixView((0,), (1,), (2,))),
        (optax.contrib.MuonDimensionNumbers((0, 1), (3,)), 4, MatrixView((2,), (0, 1), (3,))),
        (MatrixView((0,), (2,), (1,)), 3, MatrixView((0,), (2,), (1,))),
    ],
)
def test_muon_s_dimension_numbers_are_views(wish, ndim, view):
    assert as_view(wish, ndim, "kernel") == view


@pytest.mark.parametrize(
    ("wish", "ndim", "message"),
    [
        (optax.contrib.MuonDimensionNumbers(0, 2), 2, "a/kernel.* does not fit a tensor of 2 axes"),
        (optax.contrib.MuonDimensionNumbers(0, -3), 2, "does not fit a tensor of 2 axes"),
        (optax.contrib.MuonDimensionNumbers(), 1, "a/kernel.* does not fit a tensor of 1 axes"),
        (optax.contrib.MuonDimensionNumbers(), 0, "does not fit a tensor of 0 axes"),
        (MatrixView((), (0,), (0,)), 2, "a/kernel.* does not fit"),
        ("sgd", 2, '\'sgd\' for a/kernel is not "rule", "adam", a MatrixView or Muon'),
        (None, 2, "None for a/kernel is not"),
    ],
)
def test_wrong_wish_is_refused(wish, ndim, message):
    with pytest.raises(ValueError, match=message):
        route("a/kernel", (4,) * ndim, CELO2, {"kernel": wish})


def test_override_that_matches_nothing_is_refused():
    paths = [f"layer_{i}/kernel" for i in range(9)]
    check_overrides({"layer_3": "adam"}, paths)
    check_overrides(None, paths)
    with pytest.raises(ValueError, match="'conv' matches no parameter; the paths are layer_0.*, …"):
        check_overrides({"layer": "adam", "conv": "rule"}, paths)


def test_override_that_is_no_regex_is_refused():
    with pytest.raises(ValueError, match=r"'\(a' is not a regular expression: missing \)"):
        check_overrides({"(a": "adam"}, ["a"])
    overrides: Any = ["a"]
    with pytest.raises(TypeError, match=r"overrides=\['a'\] is not a dict: give a regular"):
        check_overrides(overrides, ["a"])
