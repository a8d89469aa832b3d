"""What a layer that carries a state keeps of every row, told from the configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

DECAY_BYTES: Final = 8
"""Sums of log decays are float64 in every format."""


@dataclass(frozen=True)
class Kept:
    """Numbers that a slot holds: the convolution's input, the row's key and what it adds, its sums of log decays."""

    convolution: int
    state: int = 0
    decays: int = 0

    def bytes(self, of_weights: int, of_state: int) -> int:
        """With so many bytes for a number of the hidden states, and of the state."""
        return of_weights * self.convolution + of_state * self.state + DECAY_BYTES * self.decays


def kept(config: Any) -> Kept:
    """Of one row in one layer: of Kimi Linear, other gated delta nets, Mamba-2, or a short convolution."""
    if width := _stated(config, "linear_head_dim"):
        inner = width * config.linear_num_heads
        return Kept(3 * inner, 2 * inner, inner)
    if width := _stated(config, "linear_key_head_dim"):
        keys, heads = width * config.linear_num_key_heads, int(config.linear_num_value_heads)
        values = heads * config.linear_value_head_dim
        return Kept(2 * keys + values, keys + values, heads)
    if heads := _stated(config, "mamba_num_heads", "mamba_n_heads"):
        keys = _stated(config, "n_groups", "mamba_n_groups") * _stated(config, "ssm_state_size", "mamba_d_state")
        inner = heads * _stated(config, "mamba_head_dim", "mamba_d_head")
        return Kept(inner + 2 * keys, keys + inner, heads)
    return Kept(int(config.hidden_size))


def _stated(config: Any, *names: str) -> int:
    """What the configuration says under one of these names; 0 where it has none of them."""
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)
