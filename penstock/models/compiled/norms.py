"""The norm before a model's head, in compiled code: a row's bits do not depend on how many rows there are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from penstock.models.compiled.kernels import norm_rows
from penstock.models.compiled.records import NORM, address_of
from penstock.models.fused import RMSNorm


class CompiledNorm(nn.Module):
    """Replaces an ``RMSNorm`` on a CPU."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self._norm, self._record = norm, np.zeros(1, NORM)
        self._record[0] = norm_record(norm)

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., D] -> [.., D], in the format of ``hidden``"""
        rows = hidden.to(torch.float32, memory_format=torch.contiguous_format)
        found = torch.empty_like(rows)
        norm_rows(rows.data_ptr(), rows.numel() // rows.shape[-1], address_of(self._record), found.data_ptr())
        return found.to(hidden.dtype)


def norm_record(norm: RMSNorm) -> tuple[int, int, float]:
    """The fields of a ``NORM`` record."""
    return norm.scaled.data_ptr(), len(norm.scaled), float(norm.least)
