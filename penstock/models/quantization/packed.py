"""The base class of layers whose weights are in a kernel's own layout."""

from __future__ import annotations

from torch import nn


class Packed(nn.Module):
    """Computes the same as the layer that it was made of; drop-in for ``nn.Linear`` and ``nn.Embedding``."""

    weight_bytes: int
    """Bytes of weights that are neither in ``parameters`` nor in ``buffers``."""


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the weights under ``module``, packed or not, each counted once."""
    packed = sum(m.weight_bytes for m in module.modules() if isinstance(m, Packed))
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return packed + sum(int(t.numel() * t.element_size()) for t in tensors.values())
