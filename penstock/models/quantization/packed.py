"""What layers have in common whose weights lie in a layout of a kernel's own."""

from __future__ import annotations

from torch import nn


class Packed(nn.Module):
    """Computes what the layer did that it was made of; drop-in for ``nn.Linear`` and ``nn.Embedding``."""

    weight_bytes: int
    """Of what ``parameters`` and ``buffers`` do not show."""


def weight_bytes(module: nn.Module) -> int:
    """Size of the weights under ``module``, packed or not, each counted once."""
    packed = sum(m.weight_bytes for m in module.modules() if isinstance(m, Packed))
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return packed + sum(int(t.numel() * t.element_size()) for t in tensors.values())
