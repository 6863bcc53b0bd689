"""Orthogonalization of an update by the quintic Newton–Schulz iteration (Algorithm 1, step 6)."""

from collections.abc import Callable

import torch
from torch import Tensor

from celo2.routing import MATRIX
from celo2.rule import NEWTON_SCHULZ, NEWTON_SCHULZ_EPSILON, NEWTON_SCHULZ_STEPS


def newton_schulz(
    x: Tensor, steps: int = NEWTON_SCHULZ_STEPS, dtype: torch.dtype | None = None
) -> Tensor:
    """Pushes the singular values of `x` towards 1, over its last two axes; the result in `dtype`.

    Five steps leave most of them in [0.7, 1.2], and very small ones below: that is enough.
    """
    # Transposed where rows > columns: the Gram matrix is then the smaller one.
    if x.shape[-2] > x.shape[-1]:
        return newton_schulz(x.mT, steps, dtype).mT
    norm = torch.linalg.vector_norm(x, dim=MATRIX, keepdim=True)
    y = (x / (norm + NEWTON_SCHULZ_EPSILON)).to(dtype or x.dtype)
    # One matrix is multiplied as such: as a stack of one, y yᵀ takes up to 1.4 times as long.
    single = y.shape[:-2].numel() == 1
    y = y.reshape(y.shape[-2:] if single else (-1, *y.shape[-2:]))
    multiply_add = torch.addmm if single else torch.baddbmm
    if y.shape[-1] >= 2 * y.shape[-2]:
        y = _gram_polynomial(y @ y.mT, steps, multiply_add) @ y
    else:
        a, b, c = NEWTON_SCHULZ
        for _ in range(steps):
            gram = y @ y.mT
            factor = multiply_add(gram, gram, gram, beta=b, alpha=c)
            y = multiply_add(y, factor, y, beta=a)
    return y.view(x.shape)


def _gram_polynomial(gram: Tensor, steps: int, multiply_add: Callable[..., Tensor]) -> Tensor:
    """The matrix that takes y to its last Newton–Schulz iterate, from gram = y yᵀ.

    The iterates are polynomials in the Gram matrix times y. For a wide y it is cheaper to
    multiply the small matrices and touch y only once more.
    """
    a, b, c = NEWTON_SCHULZ

    def factor_of(gram: Tensor) -> Tensor:
        factor = multiply_add(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        return factor

    total = factor = factor_of(gram)
    for _ in range(steps - 1):
        gram = factor @ gram @ factor
        factor = factor_of(gram)
        total = factor @ total
    return total
