"""Pins rotary embeddings whose frequencies depend on the length of a text to the longest text allowed."""

from __future__ import annotations

from typing import Any, Final

import torch

from penstock.models.gate import refusal

LENGTH_DEPENDENT: Final = frozenset({"longrope", "dynamic"})


def rope_kinds(config: Any) -> set[str]:
    """The kinds of rotary embedding in a model: one, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    entries = [rope] if "rope_type" in rope else [entry for entry in rope.values() if isinstance(entry, dict)]
    return {str(entry.get("rope_type", "default")) for entry in entries}


def pin_rope(base: Any, config: Any, max_model_len: int | None) -> None:
    """Fix the frequencies of ``base`` to those of a text of ``max_model_len`` tokens, if they depend on its length.

    transformers chooses them by the largest position in the batch, so that one long request would change its
    neighbours' keys. Raises ConfigError in that case if ``max_model_len`` is not given.
    """
    kinds = rope_kinds(config) & LENGTH_DEPENDENT
    if not kinds:
        return
    if max_model_len is None:
        raise refusal(config, f"its {', '.join(sorted(kinds))} rope depends on the longest request: set max_model_len")
    for module in base.modules():
        if isinstance(getattr(module, "rope_type", None), str):
            # A call with the last position lets transformers choose; the new type keeps it from choosing again.
            device = module.inv_freq.device
            module(torch.zeros(1, device=device), torch.tensor([[max_model_len - 1]], device=device))
            module.rope_type = "pinned"
        elif hasattr(module, "rope_type"):
            raise refusal(config, "its rope depends on the longest request, and differs from layer to layer")
