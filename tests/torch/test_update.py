"""Newton–Schulz as Torch computes it."""

import numpy as np
import pytest
import torch

import reference_parts
from celo2.rule import NEWTON_SCHULZ
from celo2.torch import update
from celo2.torch.update import newton_schulz

SHAPES = [(5, 5), (7, 3), (4, 30), (2, 3, 6, 20), (100, 120), (120, 100), (100, 400), (400, 100)]


@pytest.mark.parametrize("amd", [False, True])
@pytest.mark.parametrize("overshoot", [0.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz_equals_the_reference_and_works_in_place(shape, overshoot, amd, monkeypatch):
    monkeypatch.setattr(update, "_has_amd_processor", lambda: amd)  # oneDNN or MKL
    x = np.random.default_rng(0).normal(size=shape)
    expected = reference_parts.newton_schulz(x, NEWTON_SCHULZ, overshoot)
    ours = torch.tensor(x, dtype=torch.float32)
    found = newton_schulz(ours, torch.full((*shape[:-2], 1, 1), overshoot))
    assert found.data_ptr() == ours.data_ptr() and found.shape == ours.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("shape", [(5, 5), (4, 30), (100, 400)], ids=str)
def test_products_in_bfloat16_are_close_and_come_back_in_float32(shape):
    x = np.random.default_rng(0).normal(size=shape)
    found = newton_schulz(torch.tensor(x, dtype=torch.float32), dtype=torch.bfloat16)
    assert found.dtype == torch.float32
    expected = reference_parts.newton_schulz(x, NEWTON_SCHULZ)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.05 * np.abs(expected).max())


def test_large_matrices_go_to_onednn_on_processors_of_amd(monkeypatch):
    if not torch.backends.mkl.is_available():
        pytest.skip("torch has no MKL here")
    large = torch.zeros(100, 100)
    monkeypatch.setattr(update, "_has_amd_processor", lambda: False)
    assert not update._suits_onednn(large)
    monkeypatch.setattr(update, "_has_amd_processor", lambda: True)
    assert update._suits_onednn(large)
    for other in (large[:50], large.bfloat16(), large.double(), large.to("meta")):
        assert not update._suits_onednn(other)
