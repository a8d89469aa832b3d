"""How much a state-carrying layer stores for each row, from the configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

DECAY_BYTES: Final = 8
"""Bytes of a sum of log decays, which is float64 in every format."""


@dataclass(frozen=True)
class Kept:
    """How many numbers a slot holds: the convolution's input, the row's key and addition, its sums of log decays."""

    convolution: int
    state: int = 0
    decays: int = 0

    def bytes(self, of_weights: int, of_state: int) -> int:
        """Bytes for a row.

        ``of_weights`` and ``of_state`` are the bytes of a hidden state's and of a state's number.
        """
        return of_weights * self.convolution + of_state * self.state + DECAY_BYTES * self.decays


def kept(config: Any) -> Kept:
    """The numbers of one row in one layer: Kimi Linear, other gated delta nets, Mamba-2, or a short convolution."""
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
    """The configuration's value under the first of these names that it has; 0 if it has none."""
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)
