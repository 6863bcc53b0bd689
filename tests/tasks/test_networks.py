import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from celo2 import routing, rule
from celo2.tasks import networks

CONFIG = networks.LANGUAGE_MODELS["tiny"]


def leaves(init, config):
    """Path and shape of every parameter, none of which is made."""
    shapes = jax.eval_shape(lambda key: init(key, config), jax.random.key(0))
    found = jax.tree_util.tree_leaves_with_path(shapes)
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in found}


def count(init, config, under=""):
    return sum(leaf.size for path, leaf in leaves(init, config).items() if path.startswith(under))


@pytest.fixture(scope="module")
def language_model():
    """The tiny language model's logits as a compiled function of tokens [2, T]."""
    params = jax.jit(lambda key: networks.init_lm(key, CONFIG))(jax.random.key(0))
    return jax.jit(lambda tokens: networks.lm_logits(params, CONFIG, tokens))


def test_meta_training_mlp_has_2410_parameters():
    assert count(networks.init_mlp, networks.MLP_SIZES) == 2410


def test_mlp_weights_are_cut_normals_of_unit_variance_per_input():
    params = networks.init_mlp(jax.random.key(0), (400, 300, 10))
    drawn = np.asarray(params["layer_0"]["kernel"]) * math.sqrt(400)
    # A standard normal cut at ±2 and not rescaled has a standard deviation of 0.8796.
    assert drawn.std() == pytest.approx(0.8796, abs=0.005)
    assert 1.99 < np.abs(drawn).max() <= 2
    assert not params["layer_0"]["bias"].any() and not params["head"]["bias"].any()


def test_convolution_weights_count_all_taps_as_inputs():
    kernel = networks.truncated_normal(jax.random.key(0), (3, 3, 64, 128))
    assert float(kernel.std()) == pytest.approx(0.8796 / math.sqrt(9 * 64), rel=0.02)


def test_xavier_bound_and_variance():
    kernel = np.asarray(networks.xavier_uniform(jax.random.key(0), (200, 400)))
    bound = math.sqrt(6 / 600)
    assert 0.999 * bound < np.abs(kernel).max() <= bound
    assert kernel.var() == pytest.approx(2 / 600, rel=0.02)


def test_cross_entropy_is_the_negative_log_likelihood():
    logits = np.random.RandomState(0).randn(3, 4, 7).astype(np.float32)
    labels = np.random.RandomState(1).randint(0, 7, (3, 4)).astype(np.int32)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(p, labels[..., None], -1)).mean()
    assert float(jax.jit(networks.cross_entropy)(logits, labels)) == pytest.approx(
        expected, rel=1e-5
    )


def test_future_tokens_do_not_change_past_logits(language_model):
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 256)
    changed = tokens.at[:, 9].set((tokens[:, 9] + 1) % 256)
    before, after = (np.asarray(language_model(t)) for t in (tokens, changed))
    np.testing.assert_allclose(before[:, :9], after[:, :9], atol=1e-5)
    assert np.abs(before[:, 9:] - after[:, 9:]).max(axis=-1).min() > 1e-3


def test_language_model_knows_the_order_of_the_past(language_model):
    tokens = jnp.tile(jnp.arange(16), (2, 1)).at[1, :2].set(jnp.array([1, 0]))
    last = np.asarray(language_model(tokens))[:, -1]
    assert np.abs(last[0] - last[1]).max() > 1e-3


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    q, k = (jax.random.normal(jax.random.key(i), (1, 1, 2, 32)) for i in range(2))
    rotate = jax.jit(networks.rotate)
    turned_q, turned_k = (np.asarray(rotate(np.tile(x, (1, 12, 1, 1)))) for x in (q, k))
    products = np.einsum("btnh,bsnh->nts", turned_q, turned_k)
    np.testing.assert_allclose(
        np.linalg.norm(turned_q, axis=-1)[0, 7], np.linalg.norm(q, axis=-1)[0, 0], rtol=1e-5
    )
    np.testing.assert_allclose(products[:, 5, 2], products[:, 11, 8], rtol=1e-4, atol=1e-4)
    assert np.abs(products[:, 5, 2] - products[:, 5, 3]).max() > 1e-2


def test_half_precision_knows_every_position():
    x = jnp.ones((1, 2048, 1, 32))
    rotate = jax.jit(networks.rotate)
    whole, half = np.asarray(rotate(x)), rotate(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float32), whole, atol=0.02)


def test_queries_and_keys_are_normalised():
    block = networks.init_block(jax.random.key(0), 64)["attention"]
    x = jax.random.normal(jax.random.key(1), (1, 6, 64))
    scaled = block | {name: {"kernel": 50 * block[name]["kernel"]} for name in "qk"}
    attention = jax.jit(lambda params: networks.attention(params, x, 32, causal=True))
    outputs = [attention(params) for params in (block, scaled)]
    np.testing.assert_allclose(*outputs, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "blocks"), [("lm30m", 10_616_832), ("gpt2", 84_934_656), ("gpt3xl", 1_207_959_552)]
)
def test_paper_sizes_have_the_papers_block_parameters(name, blocks):
    config = networks.LANGUAGE_MODELS[name]
    assert config.width // config.head_width in (3, 6, 16)
    assert count(networks.init_lm, config) == blocks + 2 * networks.GPT2_VOCAB * config.width


@pytest.mark.parametrize(
    ("name", "millions"), [("0.3m", 0.33), ("1m", 1.05), ("3m", 2.75), ("10m", 9.99)]
)
def test_sizes_have_about_the_parameters_that_their_names_say(name, millions):
    found = count(networks.init_lm, networks.LANGUAGE_MODELS[name])
    assert found == pytest.approx(1e6 * millions, rel=0.01)


def test_widths_differ_in_nothing_else():
    models = [networks.LANGUAGE_MODELS[f"width-{width}"] for width in (64, 128, 256, 512)]
    assert [model.width for model in models] == [64, 128, 256, 512]
    assert len({dataclasses.replace(model, width=64) for model in models}) == 1


def test_vit_b16_has_85_million_parameters_in_blocks():
    assert (
        count(networks.init_vit, networks.VISION_TRANSFORMERS["b16"], under="blocks") == 84_934_656
    )
    assert (
        count(networks.init_vit, networks.VISION_TRANSFORMERS["b16"], under="position") == 256 * 768
    )


def test_patches_are_cut_in_reading_order():
    image = jnp.arange(32.0).reshape(1, 4, 4, 2)
    patches = np.asarray(networks.split_patches(image, 2))
    assert patches.shape == (1, 4, 8)
    np.testing.assert_array_equal(patches[0, 1], image[0, :2, 2:].reshape(-1))


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="head_width=48 must be even and divide width=64"):
        networks.LMConfig(64, 2, 48, 64)
    with pytest.raises(ValueError, match="patch=3 must divide side=8"):
        networks.ViTConfig(patch=3)


MODELS = {
    "mlp": (networks.init_mlp, networks.MLP_SIZES),
    "convnet": (networks.init_convnet, networks.CONVNETS["tiny"]),
    "lm": (networks.init_lm, CONFIG),
    "vit": (networks.init_vit, networks.VISION_TRANSFORMERS["tiny"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_names_send_hidden_matrices_to_the_rule_and_the_rest_to_adam(name):
    for path, leaf in leaves(*MODELS[name]).items():
        outer = path.split("/")[0] in ("embed", "patch_embed", "position", "head", "lm_head")
        expected = "adam" if outer or leaf.ndim < 2 else "rule"
        assert routing.route(path, leaf.shape, rule.CELO2).updater == expected, path


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_float32_matrices_vectors_or_convolutions(name):
    for path, leaf in leaves(*MODELS[name]).items():
        assert leaf.dtype == jnp.float32, path
        assert leaf.ndim in (1, 2, 4), path


@pytest.mark.parametrize("side", [4, 5, 8])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_by_patches_is_the_convolution(side, stride):
    x = jax.random.normal(jax.random.key(0), (2, side, side, 3))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, 4))
    expected = jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(networks.patch_convolution(kernel, x, stride), expected, atol=1e-4)
