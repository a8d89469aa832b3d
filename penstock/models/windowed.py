"""Layers that see a window or a chunk of positions store what they reach in places of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from penstock.models.attention import Attend, SlotAttention
from penstock.models.gate import RECURRENT_TYPES, layer_types
from penstock.models.recurrent.plan import FOLD

WINDOWED_TYPES: Final = frozenset({"sliding_attention", "chunked_attention"})


class WindowedAttention:
    """``near`` answers layers that look back at most ``reach`` positions, ``far`` all others."""

    def __init__(self, far: Attend, near: SlotAttention, reach: int) -> None:
        self._far = far
        self._near = near
        self._reach = reach

    def __call__(self, module: Any, *rows: Any, sliding_window: int | None = None, **options: Any) -> Tensor:
        spans = [span for span in (sliding_window, getattr(module, "chunk", None)) if span is not None]
        attend = self._near if spans and min(spans) <= self._reach else self._far
        return attend(module, *rows, sliding_window=sliding_window, **options)

    def chosen(self, modules: Sequence[Any], sliding_window: int | None) -> Any:
        """See ``attention.chosen``."""
        near = sliding_window is not None and sliding_window <= self._reach
        answering: Any = self._near if near else self._far
        return answering.chosen(modules, sliding_window)


def reach_of(config: Any) -> int | None:
    """How many positions windows, chunks and unfolded rows reach back at most; None if all layers attend to all."""
    spans = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    spans.append(FOLD if RECURRENT_TYPES.intersection(layer_types(config)) else None)
    return max((int(span) for span in spans if span), default=None)


def windowed(config: Any, layers: int) -> list[bool]:
    """Whether the attention of each layer has a window or a chunk."""
    everywhere = [getattr(config, "sliding_window", None) is not None] * layers
    return [kind in WINDOWED_TYPES for kind in layer_types(config)] or everywhere
