"""Linear layers for tests: ``linear_of(reads, gives)``."""

from __future__ import annotations

import torch
from torch import nn


def linear_of(reads: int, gives: int, bias: bool = False) -> nn.Linear:
    """Its weights depend on its inputs alone."""
    torch.manual_seed(reads)
    return nn.Linear(reads, gives, bias=bias).requires_grad_(False)
