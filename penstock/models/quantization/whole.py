"""Linear layers of quantised weights: rows are rounded to whole numbers, too, and compiled loops multiply.

A row's bits depend only on the row (``compiled.blocks``).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from penstock.models.compiled.blocks import GROUP
from penstock.models.compiled.dot import LANES, instruction
from penstock.models.compiled.products import Weights, product
from penstock.models.quantization.grouped import GroupedWeight
from penstock.models.quantization.packed import Packed

LARGEST_GROUP: Final = 256
"""The largest group of weights; smaller ones are powers of two, too."""


class WholeLinear(Packed):
    """Replaces ``linear``, with weights packed from its own and padded with zeros to whole groups and blocks."""

    def __init__(self, values: Tensor, scales: Tensor, bits: int, shift: int, linear: nn.Linear) -> None:
        super().__init__()
        self.outputs, self.inputs = linear.weight.shape
        self._computed, self._missing = raised(self.outputs, LANES), raised(self.inputs, GROUP) - self.inputs
        arrays = values.numpy(), scales.view(torch.uint16).numpy()
        self.weights = Weights(*arrays, bits, shift, self.inputs + self._missing, self._computed)
        self.weight_bytes = sum(array.nbytes for array in arrays)
        self.bias = linear.bias

    @property
    def in_blocks(self) -> bool:
        """Whether no output had to be added as padding."""
        return bool(self._computed == self.outputs)

    @property
    def in_groups(self) -> bool:
        """Whether no input had to be added as padding."""
        return not self._missing

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
        if self._missing:
            rows = nn.functional.pad(rows, (0, self._missing))
        found = torch.empty(len(rows), self._computed)
        product(rows.contiguous().numpy(), self.weights, found.numpy())
        return found if self._computed == self.outputs else found[:, : self.outputs].contiguous()


def scales_in_blocks(*scales: Tensor) -> Tensor:
    """Each of ``scales`` [O, G] as float16 in the order of ``compiled.blocks``: blocks, groups, ``scales``, outputs."""
    outputs, groups = scales[0].shape
    together = nn.functional.pad(torch.stack(scales).half(), (0, 0, 0, raised(outputs, LANES) - outputs))
    return together.view(len(scales), -1, LANES, groups).permute(1, 3, 0, 2).contiguous()


def shift_of(weight: GroupedWeight) -> int:
    return (weight.group // GROUP).bit_length() - 1


def raised(count: int, unit: int) -> int:
    """The next multiple of ``unit``."""
    return -(-count // unit) * unit


def works() -> bool:
    """Whether this processor has the instructions for compiled products."""
    return instruction() is not None
