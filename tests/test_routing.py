"""Who updates what, and in which view, on the trees people have."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from celo2.jax.optimizer import leaf_paths, leaf_routes
from celo2.routing import path_names, published_view, route
from celo2.rule import CELO2, CELO2_BASE
from celo2.tasks import networks


def routes(tree, config=CELO2, **options) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Path → (updater, viewed shape)."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(tree)]
    ways = leaf_routes(tree, config, **options)
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
