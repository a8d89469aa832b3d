"""Float linear layers in oneDNN's own weight layout, arranged once at load.

Measured on one core with AVX512 (benchmark shapes 512 to 5632 x 2048): with 4 to 16 rows the packed product takes 0.3
to 0.6 of torch's time in float32 and 0.4 to 0.7 in bfloat16 (where both give the same bits); with one row it takes the
same time in float32 from width 1024 on, and 0.4 to 0.6 in bfloat16. Below ``SMALLEST`` elements the call costs more
than it saves.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

SMALLEST: Final = 1 << 17


class PackedLinear(nn.Module):
    """Computes what ``linear`` computes; float32 results differ from it by rounding only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight_bytes: int = linear.weight.numel() * linear.weight.element_size()
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., out]"""
        return torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer of ``module`` that gains from it, in place; its plain weight is given up."""
    for name, child in module.named_children():
        if _gains(child):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes packed layers of this type on this processor; bfloat16 takes AVX512."""
    if not torch.backends.mkldnn.is_available():
        return False
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else dtype == torch.float32
    return bool(supported)


def weight_bytes(module: nn.Module) -> int:
    """Size of the weights under ``module``, packed or not, each counted once."""
    packed = sum(m.weight_bytes for m in module.modules() if isinstance(m, PackedLinear))
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return packed + sum(int(t.numel() * t.element_size()) for t in tensors.values())


def _gains(module: nn.Module) -> bool:
    # Subclasses of Linear may compute something else, so only the class itself is replaced.
    return (
        type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.numel() >= SMALLEST
        and can_pack(module.weight.dtype)
    )
