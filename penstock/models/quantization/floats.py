"""Float linear layers whose weights are arranged once at load: for compiled loops, or in oneDNN's own layout.

Compiled loops give a row the same bits whatever is beside it (``compiled.float_blocks``); oneDNN's do not.

oneDNN measured on one core with AVX512 (benchmark shapes 512 to 5632 x 2048): with 4 to 16 rows the packed product
takes 0.3 to 0.6 of torch's time in float32 and 0.4 to 0.7 in bfloat16 (where both give the same bits); with one row it
takes the same time in float32 from width 1024 on, and 0.4 to 0.6 in bfloat16. Below ``SMALLEST`` elements the call
costs more than it saves.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.models.compiled.dot import LANES
from penstock.models.compiled.float_blocks import FORMS, QUAD, in_float_blocks, rows_of_blocks
from penstock.models.compiled.products import Weights
from penstock.models.quantization.grouped import raised
from penstock.models.quantization.packed import BlockLinear, Packed

SMALLEST: Final = 1 << 17


class FloatLinear(BlockLinear):
    """A linear layer with weights in float32, bfloat16 or float16, as ``linear`` has them.

    Rows are rounded to the same format before they are multiplied, as they are between transformers' modules.
    """

    def __init__(self, linear: nn.Linear) -> None:
        outputs, inputs = linear.weight.shape
        self._format = linear.weight.dtype
        values = in_float_blocks(linear.weight)
        stored = values if self._format == torch.float32 else values.view(torch.uint16)
        form, scales = FORMS[self._format], np.empty(0, np.uint16)
        super().__init__(Weights(stored.numpy(), scales, form, 0, raised(inputs, QUAD), raised(outputs, LANES)), linear)
        self._blocks = values

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of single outputs, float32: [..] -> [.., in]."""
        return rows_of_blocks(self._blocks, ids)[..., : self.inputs].float()


class FloatHead(FloatLinear):
    """Drop-in for the head's ``nn.Linear``; an embedding can read the same rows, so that they are held once."""

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits [.., D] -> [.., V], left in float32."""
        return self.products(hidden)


class PackedLinear(Packed):
    """Computes the same as ``linear``; float32 results differ by rounding only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight_bytes = linear.weight.numel() * linear.weight.element_size()
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., out]"""
        return torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")


class TiedHead(nn.Module):
    """A float head whose weight is also the embedding's: it stays unpacked, so that it is held once.

    Measured in float32, 49152 x 576, with 1 to 64 rows: 1.0 to 1.4 times the time of a packed head with two threads,
    1.2 to 1.8 times with one. torch's own product takes 2 to 5 times as long.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., D] -> [.., V]"""
        return torch.ops.mkldnn._linear_pointwise(hidden, self.weight, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes packed layers of this type on this processor; bfloat16 takes AVX512."""
    if not torch.backends.mkldnn.is_available():
        return False
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else dtype == torch.float32
    return bool(supported)


def gains(linear: nn.Linear) -> bool:
    """Whether a linear layer is faster when it is packed."""
    return linear.weight.device.type == "cpu" and linear.weight.numel() >= SMALLEST and can_pack(linear.weight.dtype)
