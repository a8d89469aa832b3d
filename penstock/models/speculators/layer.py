"""The parts of EAGLE's modules: one Llama layer over slots, and a vocabulary smaller than the target's.

Shapes: N rows of a batch, n rows that ask for logits, D hidden size, I width of the attention's input, H query heads, K
key heads, d width of a head, V the target's vocabulary, v the tokens that can be drafted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from penstock.models.attention import Attend


class Rotation(nn.Module):
    """Cosines and sines of the rows' positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        # The frequencies come from the configuration, not from a file, so they cannot stay on the meta device until
        # loaded.
        with torch.device("cpu"):
            self.embedding = LlamaRotaryEmbedding(config)

    def forward(self, like_ND: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors [N, d], in the type of ``like_ND``."""
        cos, sin = self.embedding(like_ND, positions_N[None])
        return cos[0], sin[0]


class Attention(nn.Module):
    """Llama's attention, whose input may be wider than the hidden size. ``biased`` names projections with a bias.

    If ``normed``, queries and keys are normed head by head, as in Qwen3.
    """

    def __init__(self, config: Any, width: int, biased: Collection[str], *, index: int, normed: bool) -> None:
        super().__init__()
        self.layer_idx = index
        self.head_dim: int = config.head_dim
        heads, key_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, heads, bias="q_proj" in biased)
        self.k_proj = nn.Linear(width, key_heads, bias="k_proj" in biased)
        self.v_proj = nn.Linear(width, key_heads, bias="v_proj" in biased)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias="o_proj" in biased)
        self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()

    def forward(self, entering_NI: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query_HNd, key_KNd, value_KNd = (
            projection(entering_NI).unflatten(-1, (-1, self.head_dim)).transpose(0, 1) for projection in projections
        )
        query_HNd, key_KNd = self.q_norm(query_HNd), self.k_norm(key_KNd)
        query_HNd, key_KNd = apply_rotary_pos_emb(query_HNd, key_KNd, *rotation, unsqueeze_dim=0)
        output_NHd = attend(self, query_HNd, key_KNd, value_KNd, None, scaling=self.head_dim**-0.5)
        return self.o_proj(output_NHd.flatten(1))


class DecoderLayer(nn.Module):
    """A Llama layer without a norm before attention: the attention's input and the residual are given apart."""

    def __init__(
        self, config: Any, width: int, biased: Collection[str], *, index: int = 0, normed: bool = False
    ) -> None:
        super().__init__()
        self.self_attn = Attention(config, width, biased, index=index, normed=normed)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, entering_NI: Tensor, residual_ND: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        hidden_ND = residual_ND + self.self_attn(entering_NI, rotation, attend)
        return hidden_ND + self.mlp(self.post_attention_layernorm(hidden_ND))


class DraftVocabulary(nn.Module):
    """Maps logits over the tokens that can be drafted to the target's vocabulary.

    ``target_ids_v`` [v] int64 holds the target's id of each; None where the vocabularies are the same.
    """

    def __init__(self, target_ids_v: Tensor | None, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.target_ids_v = nn.Buffer(target_ids_v, persistent=False) if target_ids_v is not None else None

    def forward(self, logits_nv: Tensor) -> Tensor:
        """The logits over the target's vocabulary, float32 [n, V]; -inf for tokens that cannot be drafted."""
        logits_nv = logits_nv.float()
        if self.target_ids_v is None:
            return logits_nv
        logits_nV = logits_nv.new_full((len(logits_nv), self.vocab_size), -torch.inf)
        return logits_nV.index_copy_(1, self.target_ids_v, logits_nv)
