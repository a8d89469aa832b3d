"""The base classes of layers whose weights are in a kernel's own layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.models.compiled.products import Weights, product


class Packed(nn.Module):
    """Computes the same as the layer that it was made of; drop-in for ``nn.Linear`` and ``nn.Embedding``."""

    weight_bytes: int
    """Bytes of weights that are neither in ``parameters`` nor in ``buffers``."""


class BlockLinear(Packed):
    """Replaces ``linear``, with weights in blocks of outputs that compiled loops multiply (``compiled.products``).

    Outputs and inputs are filled up with zeros as ``weights`` has them. A row's bits depend only on the row.
    """

    def __init__(self, weights: Weights, linear: nn.Linear) -> None:
        super().__init__()
        self.outputs, self.inputs = linear.weight.shape
        self.weights = weights
        self.weight_bytes = weights.values.nbytes + weights.scales.nbytes
        self.bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., out], in the format of ``hidden``"""
        return self.products(hidden).to(hidden.dtype)

    def products(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., out], float32"""
        products = self.product(hidden.reshape(-1, hidden.shape[-1]).float())
        if self.bias is not None:
            products += self.bias
        return products.view(*hidden.shape[:-1], -1)

    def product(self, rows: Tensor) -> Tensor:
        """[N, in] -> [N, out], without the bias, both float32"""
        missing, computed = self.weights.inputs - self.inputs, self.weights.outputs
        if missing:
            rows = nn.functional.pad(rows, (0, missing))
        found = torch.empty(len(rows), computed)
        product(rows.contiguous().numpy(), self.weights, found.numpy())
        return found if computed == self.outputs else found[:, : self.outputs].contiguous()


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the weights under ``module``, packed or not, each counted once."""
    packed = sum(m.weight_bytes for m in module.modules() if isinstance(m, Packed))
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return packed + sum(int(t.numel() * t.element_size()) for t in tensors.values())
