"""The reference itself, against the authors' vectors and against what the rule promises."""

import dataclasses
import json
from typing import get_args

import numpy as np
import pytest

import reference
import reference_parts
from celo2.routing import MatrixView, default_view
from celo2.rule import CELO2, CELO2_BASE, Form, Norm, RuleConfig, initial_weights
from conftest import golden_folder

GOLDEN = (
    "celo2",
    "celo2_base",
    "celo2_base_rmsmult0.2",
    "celo2_base_expmult0.001",
    "celo2_pretrained",
)
PUBLISHED = {"published": True, "hold": False, "skip_nonfinite": False}
SHAPES = [(), (7,), (5, 3), (4, 4), (2, 6, 10)]


def float32(x: float) -> float:
    """`x` rounded to float32, as the golden float64 run has its decays and coefficients."""
    return float(np.float32(x))


def golden_config(given: dict) -> RuleConfig:
    return RuleConfig(
        hidden=(given["ff_hidden_size"],) * given["ff_hidden_layers"],
        momentum_decays=tuple(map(float32, given["initial_momentum_decays"])),
        rms_decay=float32(given["initial_rms_decays"][0]),
        factored_decays=tuple(map(float32, given["initial_adafactor_decays"])),
        form="d_exp_m" if given["exp_mult"] else "d",
        orthogonalize=given["orthogonalize"],
    )


def golden_weights(arrays) -> dict[str, np.ndarray]:
    weights = {name: arrays[f"theta/{name}"] for name in ("b0", "w1", "b1", "w2", "b2")}
    return weights | {"w0": np.concatenate([arrays[f"theta/w0__{i}"] for i in range(14)])}


def run(config, weights, params, grads, **policies):
    """The updates of all steps, and the moments after the last."""
    published = policies.get("published", False)
    moments = reference.init(config, grads[0].shape, published)
    updates = []
    for param, grad in zip(params, grads, strict=True):
        update, moments = reference.step(config, weights, param, grad, moments, **policies)
        updates.append(update)
    return np.stack(updates), moments


@pytest.mark.parametrize("name", GOLDEN)
def test_reference_equals_the_published_implementation(name):
    folder = golden_folder(name)
    golden = json.loads((folder / "golden.json").read_text())["configs"][name]
    config = golden_config(golden["settings"])
    coefficients = tuple(map(float32, reference.NS_COEFFICIENTS))
    with np.load(folder / golden["file"]) as arrays:
        weights = golden_weights(arrays)
        for leaf in golden["leaves"]:
            updates, moments = run(
                config,
                weights,
                arrays[f"params/{leaf}"],
                arrays[f"grads/{leaf}"],
                coefficients=coefficients,
                **PUBLISHED,
            )
            np.testing.assert_allclose(
                golden["settings"]["rmsmult"] * updates,
                arrays[f"updates_f64/{leaf}"],
                rtol=0,
                atol=1e-12,
                err_msg=leaf,
            )
            check_golden_state(moments, arrays, leaf)


def check_golden_state(moments, arrays, leaf):
    """The final state is stored in float32 only; entries that cancel have a larger error."""
    stored = {name: arrays[f"state/{name}/{leaf}"] for name in ("m", "rms", "v_row", "v_col")}
    if moments.momentum[0].ndim < 2:
        stored["v_row"] = arrays[f"state/v_diag/{leaf}"]
    ours = {"m": moments.momentum, "rms": [moments.rms], "v_row": moments.rows}
    if moments.cols:
        ours["v_col"] = moments.cols
    for name, planes in ours.items():
        scale = np.abs(stored[name]).max()
        np.testing.assert_allclose(
            np.stack(planes, axis=-1),
            stored[name],
            rtol=1e-6,
            atol=1e-6 * scale,
            err_msg=f"{leaf} {name}",
        )
    assert moments.count == arrays["state/iteration"] == 12


def problem(shape, steps=4, seed=0, config=CELO2):
    """A rule's weights, and parameters and gradients for a few steps."""
    rng = np.random.default_rng(seed)
    weights = initial_weights(config, rng)
    weights |= {f"b{i}": rng.normal(size=weights[f"b{i}"].shape) for i in range(3)}
    return weights, rng.normal(size=(steps, *shape)), rng.normal(size=(steps, *shape))


def slice_rms(x):
    axes = tuple(range(max(0, x.ndim - 2), x.ndim))
    return np.sqrt(np.mean(x**2, axis=axes))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("config", [CELO2, CELO2_BASE])
def test_update_has_unit_rms(config, shape):
    updates, _ = run(config, *problem(shape))
    for update in updates:
        np.testing.assert_allclose(slice_rms(update), 1, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_state_starts_at_zero(shape):
    moments = reference.init(CELO2, shape)
    arrays = [*moments.momentum, moments.rms, *moments.rows, *moments.cols, moments.running_rms]
    assert moments.count == 0 and len(moments.momentum) == len(moments.rows) == 3
    assert all(not array.any() for array in arrays)


def test_a_tie_factors_over_the_later_axis_first():
    assert reference.factored_axes((4, 4), published=False) == (0, 1)
    assert reference.factored_axes((5, 3), published=False) == (1, 0)
    assert reference.factored_axes((9, 5, 3), published=False) == (2, 1)
    assert reference.factored_axes((9, 5, 3), published=True) == (1, 0)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (8, 8), (2, 6, 10)])
def test_newton_schulz_brings_singular_values_near_one(shape):
    x = np.random.default_rng(0).normal(size=shape)
    before = np.linalg.svd(x, compute_uv=False)
    after = np.linalg.svd(reference.newton_schulz(x), compute_uv=False)
    assert before.max() > 2
    assert 0.5 < after.min() and after.max() < 1.5


def test_newton_schulz_keeps_singular_vectors():
    x = np.random.default_rng(0).normal(size=(6, 4))
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    rotated = u.T @ reference.newton_schulz(x) @ vt.T
    np.testing.assert_allclose(rotated, np.diag(np.diag(rotated)), atol=1e-12)


@pytest.mark.parametrize("norm", get_args(Norm))
@pytest.mark.parametrize("form", get_args(Form))
def test_stack_of_matrices_equals_its_slices(form, norm):
    config = dataclasses.replace(CELO2, form=form, norm=norm)
    weights, params, grads = problem((2, 3, 6, 5))
    grads[0, 0, 1] = 0  # one slice starts a step late,
    grads[2, 1, 0, 0, 0] = np.nan  # and one loses a step
    updates, moments = run(config, weights, params, grads)
    for i in np.ndindex(2, 3):
        at = (slice(None), *i)
        alone, alone_moments = run(config, weights, params[at], grads[at])
        np.testing.assert_allclose(updates[at], alone, atol=1e-12)
        np.testing.assert_allclose(moments.running_rms[i], alone_moments.running_rms)


@pytest.mark.parametrize("config", [CELO2, CELO2_BASE])
def test_averaged_magnitude_cancels_under_the_norm(config):
    inputs = problem((5, 3))
    plain, _ = run(config, *inputs)
    averaged, _ = run(dataclasses.replace(config, form="d_exp_m_avg"), *inputs)
    np.testing.assert_allclose(averaged, plain, atol=1e-8)


def test_elementwise_magnitude_changes_the_update():
    inputs = problem((5, 3))
    plain, _ = run(CELO2_BASE, *inputs)
    scaled, _ = run(dataclasses.replace(CELO2_BASE, form="d_exp_m"), *inputs)
    assert 1e-6 < np.abs(scaled - plain).max() < 0.1


def test_norms_scale_the_raw_update_as_documented():
    raw = dataclasses.replace(CELO2_BASE, norm="raw")
    weights, params, grads = problem((5, 3))
    scale = slice_rms(run(raw, weights, params, grads)[0]).mean()
    for name in ("w2", "b2"):  # so that some steps are clipped and some are not
        weights[name] = weights[name] / scale
    by_norm = {
        norm: run(dataclasses.replace(raw, norm=norm), weights, params, grads)[0]
        for norm in get_args(Norm)
    }
    size = np.sqrt(slice_rms(by_norm["raw"]) ** 2 + 1e-9)
    running = np.cumsum(size) / np.arange(1, len(size) + 1)
    expected = {
        "norm": 1 / size,
        "norm_clip": np.minimum(1, 1 / size),
        "rolling_norm": 1 / running,
        "rolling_norm_clip": np.minimum(1, running / size),
    }
    for norm, factor in expected.items():
        scaled = by_norm["raw"] * factor[:, None, None]
        np.testing.assert_allclose(by_norm[norm], scaled, rtol=1e-12, err_msg=norm)
    for norm in ("norm_clip", "rolling_norm_clip"):
        assert 0 < (expected[norm] < 1).sum() < len(size), norm


@pytest.mark.parametrize(
    ("stored", "matrix_view", "viewed_shape"),
    [
        ((3, 3, 4, 8), default_view(4), (36, 8)),
        ((8, 4, 3, 3), MatrixView((), (1, 2, 3), (0,)), (36, 8)),
        ((2, 5, 3), default_view(3), (2, 5, 3)),
        ((6, 2, 3), MatrixView((), (0,), (1, 2)), (6, 6)),
        ((7,), default_view(1), (7,)),
        ((), default_view(0), ()),
    ],
)
def test_unview_undoes_view(stored, matrix_view, viewed_shape):
    x = np.random.default_rng(0).normal(size=stored)
    viewed = reference_parts.view(x, matrix_view)
    assert viewed.shape == viewed_shape
    np.testing.assert_array_equal(reference_parts.unview(viewed, matrix_view, stored), x)


def test_view_of_a_torch_weight_is_its_transpose():
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(reference_parts.view(x, MatrixView((), (1,), (0,))), x.T)
