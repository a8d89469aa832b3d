"""EAGLE-1 and EAGLE-2: the next token's embedding beside the target's last hidden state, through one layer.

Source: Li et al., EAGLE (arXiv 2401.15077), section 3.1; SafeAILab/EAGLE, cnets1.py. EAGLE-2 has the same weights.
Shapes as in layer.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.attention import Attend
from penstock.models.speculators.layer import DecoderLayer, Rotation


class Eagle(nn.Module):
    """A row is a token and the feature of the token before it; what comes out stands for the token's own feature.

    A feature is the target's final hidden state after its norm. ``head`` gives logits over the target's vocabulary.
    ``fc_bias`` and ``biased`` name what the checkpoint has biases for.
    """

    def __init__(
        self, config: Any, embed_tokens: nn.Module, head: nn.Module, *, fc_bias: bool, biased: Collection[str]
    ) -> None:
        super().__init__()
        self.hidden_size: int = config.hidden_size
        self.embed_tokens = embed_tokens
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList([DecoderLayer(config, config.hidden_size, biased)])
        self.rotation = Rotation(config)
        self.head = head

    def fuse(self, features_NF: Tensor) -> Tensor:
        """The features [N, D] that rows take from the target's states [N, F]: here F = D, and they are the same."""
        return features_NF

    def forward(self, tokens_N: Tensor, feature_ND: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """What stands for the rows' own features [N, D]. ``attend`` stores keys and values: see ``Attend``."""
        hidden_ND = self.fc(torch.cat([self.embed_tokens(tokens_N), feature_ND], dim=-1))
        return self.layers[0](hidden_ND, hidden_ND, self.rotation(hidden_ND, positions_N), attend)

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """float32 [n, V] of the token after each row, from what ``forward`` gave."""
        return self.head(hidden_nD)
