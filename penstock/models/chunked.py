"""Llama 4's attention over slots: most layers see one chunk of positions; in the others queries grow with position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

CHUNKED: Final = "chunked_attention"


@dataclass(frozen=True)
class Growth:
    """Temperature tuning (arXiv 2501.19399) in Llama 4's layers without rotary embeddings."""

    every: float
    by: float

    def of(self, positions_N: Tensor) -> Tensor:
        """The factor for the queries at each of these positions, [N]."""
        return torch.log1p(torch.floor((positions_N.float() + 1.0) / self.every)) * self.by + 1.0


def follow_positions(config: Any, layers: Sequence[Any], types: Sequence[str]) -> None:
    """Give the attention modules of chunked models what ``attention.SlotAttention`` needs to know, in place.

    transformers' modules would take a row's place in the batch for its position. ``types`` are the layers'.
    """
    if CHUNKED not in (getattr(config, "layer_types", None) or ()):
        return
    for layer, kind in zip(layers, types, strict=True):
        attention = layer.self_attn
        if kind == CHUNKED:
            attention.chunk = int(config.attention_chunk_size)
        if attention.attn_temperature_tuning and not attention.use_rope:
            attention.growth = Growth(float(attention.floor_scale), float(attention.attn_scale))
            attention.attn_temperature_tuning = False
