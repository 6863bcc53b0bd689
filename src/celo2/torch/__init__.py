"""Celo2 for PyTorch: a `torch.optim.Optimizer` that reads the same rule files as the JAX one."""

from celo2.torch.optimizer import Celo2, Celo2Base

__all__ = ["Celo2", "Celo2Base"]
