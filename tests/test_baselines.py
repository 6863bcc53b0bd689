import jax
import numpy as np
import pytest

from celo2.baselines import muon
from celo2.tasks.networks import init_patch_convnet
from rules import jit


def test_muon_takes_what_the_rule_takes():
    params = init_patch_convnet(jax.random.key(0), (16, 32, 32))
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params)
    tx = muon(lambda count: 1.0)
    updates = jit(lambda p, g: tx.update(g, tx.init(p), p)[0])(params, grads)
    folded = updates["conv_1"]["kernel"].reshape(-1, 32)
    singular = np.linalg.svd(folded, compute_uv=False)
    assert singular.max() / singular.min() < 3
    # Adam's first step is the gradient's sign, up to its Nesterov momentum.
    head = np.abs(updates["head"]["kernel"])
    assert head.max() == pytest.approx(head.min(), rel=1e-3)
