"""Gemma 3n's parallel hidden states of a row: made from its embedding, and merged behind the last layer.

Source: transformers' Gemma3nTextModel; alternating updates, arXiv 2301.13310.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

LEAST_SQUARE: Final = 1e-5


def spread(base: Any, embedded_1ND: Tensor) -> Tensor:
    """[1, N, D] -> [streams, 1, N, D]: the embedding, and its projections scaled to the same length."""
    length = root_mean_square(embedded_1ND)
    return torch.stack([embedded_1ND, *(as_long(one(embedded_1ND), length) for one in base.altup_projections)])


def gather(base: Any, hidden_S1ND: Tensor) -> Tensor:
    """[streams, 1, N, D] -> [1, N, D]: the mean of the first stream and of the others' projections, as long as it."""
    length = root_mean_square(hidden_S1ND[0])
    others = zip(base.altup_unembed_projections, hidden_S1ND[1:], strict=True)
    return torch.stack([hidden_S1ND[0], *(as_long(one(hidden), length) for one, hidden in others)]).mean(dim=0)


def root_mean_square(hidden: Tensor) -> Tensor:
    """[.., D] -> [.., 1]"""
    return (hidden**2).mean(dim=-1, keepdim=True) ** 0.5


def as_long(hidden: Tensor, length: Tensor) -> Tensor:
    own = (hidden**2).mean(dim=-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
    return hidden * length / own
