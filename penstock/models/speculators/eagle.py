"""EAGLE's modules: the next token's embedding beside hidden states of the target, through one layer.

Source: Li et al., EAGLE (arXiv 2401.15077), section 3.1, and EAGLE-3 (arXiv 2503.01840), section 3; SafeAILab/EAGLE,
cnets1.py and cnets.py; vllm-project/speculators for ``norm_before_residual`` and ``norm_before_fc``. Shapes as in
layer.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from penstock.models.attention import Attend
from penstock.models.speculators.layer import DecoderLayer, Rotation


class Eagle(nn.Module):
    """EAGLE-1, whose weights also serve EAGLE-2, over the target's last hidden state.

    A row is a token and the feature of the token before it; the output predicts the token's own feature. A feature is
    the target's final hidden state after its norm. ``head`` gives logits over the target's vocabulary. ``fc_bias`` and
    ``biased`` say which projections have a bias in the checkpoint.
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
        """The predicted features [N, D] of the rows' own tokens. ``attend`` stores keys and values: see ``Attend``."""
        hidden_ND = self.fc(torch.cat([self.embed_tokens(tokens_N), feature_ND], dim=-1))
        return self.layers[0](hidden_ND, hidden_ND, self.rotation(hidden_ND, positions_N), attend)

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """The logits of the token after each row, float32 [n, V], from the output of ``forward``."""
        return self.head(hidden_nD)


class MidLayer(DecoderLayer):
    """A layer that attends over embedding and feature side by side; its residual is the feature alone.

    With ``norm_before_residual`` the residual is the normed feature.
    """

    def __init__(self, config: Any, biased: Collection[str], norm_before_residual: bool) -> None:
        super().__init__(config, 2 * config.hidden_size, biased)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._norm_before_residual = norm_before_residual

    def join(self, embedding_ND: Tensor, feature_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the attention [N, 2D], and the residual [N, D]."""
        normed_ND = self.hidden_norm(feature_ND)
        entering_NI = torch.cat([self.input_layernorm(embedding_ND), normed_ND], dim=-1)
        return entering_NI, normed_ND if self._norm_before_residual else feature_ND


class Eagle3(nn.Module):
    """EAGLE-3, over fused states of three of the target's layers.

    A row is a token and the feature of the token before it; the output predicts the token's own feature. A feature is
    ``fuse`` of the target's states, or the output of the row before. ``features_width`` is F, the width of all the
    states that it reads side by side. ``head`` gives logits over the target's vocabulary.
    """

    def __init__(
        self,
        config: Any,
        features_width: int,
        embed_tokens: nn.Module,
        head: nn.Module,
        *,
        biased: Collection[str],
        norm_before_residual: bool,
        norm_before_fc: bool,
    ) -> None:
        super().__init__()
        self.hidden_size: int = config.hidden_size
        self.embed_tokens = embed_tokens
        self.input_norm = LlamaRMSNorm(features_width, config.rms_norm_eps) if norm_before_fc else nn.Identity()
        self.fc = nn.Linear(features_width, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config, biased, norm_before_residual)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotation = Rotation(config)
        self.head = head

    def fuse(self, features_NF: Tensor) -> Tensor:
        """The features [N, D] that rows take from the target's states [N, F]."""
        return self.fc(self.input_norm(features_NF))

    def forward(self, tokens_N: Tensor, feature_ND: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """The predicted features [N, D] of the rows' own tokens, before the norm. ``attend`` stores keys and values."""
        entering_NI, residual_ND = self.midlayer.join(self.embed_tokens(tokens_N), feature_ND)
        return self.midlayer(entering_NI, residual_ND, self.rotation(feature_ND, positions_N), attend)

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """The logits after each row, float32 [n, V], from ``forward``'s output; -inf for tokens it cannot draft."""
        return self.head(self.norm(hidden_nD))
