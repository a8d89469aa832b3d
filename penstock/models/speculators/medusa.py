"""Medusa: heads on the target's last hidden state, each for one token further ahead.

Source: Cai et al., Medusa (arXiv 2401.10774), section 2.1.1; FasterDecoding/Medusa. Shapes as in layer.py.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.models.speculators.layer import DraftVocabulary


class Block(nn.Module):
    """The layers of a head before its logits: x + SiLU(Wx + b) for each."""

    def __init__(self, hidden_size: int, layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(layers))

    def forward(self, hidden_nD: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_nD = hidden_nD + F.silu(layer(hidden_nD))
        return hidden_nD


class Medusa(nn.Module):
    """``heads`` heads of ``layers`` layers each, over v tokens that ``vocabulary`` maps to the target's."""

    def __init__(
        self, heads: int, layers: int, hidden_size: int, vocab_size: int, vocabulary: DraftVocabulary, *, bias: bool
    ) -> None:
        super().__init__()
        self.heads = heads
        self.hidden_size = hidden_size
        self.blocks = nn.ModuleList(Block(hidden_size, layers, bias) for _ in range(heads))
        self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(heads))
        self.vocabulary = vocabulary

    def head_logits(self, head: int, hidden_nD: Tensor) -> Tensor:
        """The logits, float32 [n, V], of the token ``head`` + 2 places after each row's, from final-normed states."""
        return self.vocabulary(self.lm_heads[head](self.blocks[head](hidden_nD)))
