"""SPD's speculation module: a small transformer over features from whatever depth each token has reached.

Two variants, both from Wang et al., Speculative Pipeline Decoding (arXiv 2605.30852), sections 3.3 to 3.5, as
yuyijiong/speculative_pipeline_decoding stores them. The paper's (its version 10) has a projection for each of the n + 1
depths, and the rows of tokens under way are memory: they give keys and values to every layer, through a projection of
their own in each, and are not updated. In the later one (11) a few anchors stand for all depths, so that one module
serves every number of stages, and all rows go through all layers. A head on the first stage's output (early exit) is
the second variant with one anchor.

Shapes as in layer.py; F is the width of all states that are read, side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from penstock.models.attention import Attend
from penstock.models.speculators.layer import DecoderLayer, Rotation


class SpecLayer(DecoderLayer):
    """A Llama layer; with normed queries and keys it is Qwen3's."""

    def __init__(self, config: Any, index: int, biased: Collection[str], normed: bool) -> None:
        super().__init__(config, config.hidden_size, biased, index=index, normed=normed)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_ND: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:  # type: ignore[override]
        return super().forward(self.input_layernorm(hidden_ND), hidden_ND, rotation, attend)


class Spd(nn.Module):
    """A row is a token and its own feature g, made of states from the depth that its level names.

    ``levels`` lists the target's hidden states behind each level's feature, 0 being the embedding: level 0 is all that
    is known of a token that enters the pipeline. With ``memory`` (the paper's) rows above level ``asking`` are not
    updated. ``norm`` is the target's own, and ``head`` gives logits over the target's vocabulary.
    """

    def __init__(
        self,
        config: Any,
        layers: int,
        levels: Sequence[Sequence[int]],
        embed_tokens: nn.Module,
        norm: nn.Module,
        head: nn.Module,
        *,
        biased: Collection[str],
        normed: bool,
        memory: bool,
        asking: int = 0,
    ) -> None:
        super().__init__()
        width: int = config.hidden_size
        self.hidden_size = width
        self.levels = [tuple(level) for level in levels]
        self.asking = asking
        # State 0, the embedding, is looked up here instead of being sent.
        self.reads = tuple(sorted({state for level in levels for state in level} - {0}))
        """The states that the target's stages send."""
        self.embed_tokens = embed_tokens
        self.projections = nn.ModuleList(nn.Linear(len(level) * width, width, bias=False) for level in levels)
        self.layers = nn.ModuleList(SpecLayer(config, i, biased, normed) for i in range(layers))
        self.memory = (
            nn.ModuleList(
                nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(len(levels) - 1))
                for _ in range(layers)
            )
            if memory
            else None
        )
        self.rotation = Rotation(config)
        self.norm = norm
        self.head = head

    def fuse(self, level: int, tokens_N: Tensor, states_NF: Tensor) -> Tensor:
        """The features g [N, D] of tokens at one level (Eq. 1); only the states that the level reads count."""
        parts = states_NF.chunk(len(self.reads), dim=-1) if self.reads else ()
        read = (self.embed_tokens(tokens_N) if k == 0 else parts[self.reads.index(k)] for k in self.levels[level])
        feature_ND: Tensor = self.projections[level](torch.cat(list(read), dim=-1))
        return feature_ND

    def forward(self, feature_ND: Tensor, levels_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """The states [N, D] for logits, of rows at these levels. ``attend`` stores keys and values."""
        rotation = self.rotation(feature_ND, positions_N)
        hidden_ND = feature_ND
        remembered = {
            level: (levels_N == level).nonzero()[:, 0].to(feature_ND.device)
            for level in (levels_N.unique().tolist() if self.memory is not None else ())
            if level > self.asking
        }
        for index, layer in enumerate(self.layers):
            if remembered:
                hidden_ND = self._remembered(index, hidden_ND, feature_ND, remembered)
            hidden_ND = layer(hidden_ND, rotation, attend)
        return hidden_ND

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """The logits after each row, float32 [n, V], from ``forward``'s output; -inf for tokens it cannot draft."""
        logits_nV: Tensor = self.head(self.norm(hidden_nD))
        return logits_nV

    def _remembered(
        self, index: int, hidden_ND: Tensor, feature_ND: Tensor, remembered: Mapping[int, Tensor]
    ) -> Tensor:
        """The input of a layer, where memory rows are replaced by their features through the layer's own projection."""
        assert self.memory is not None
        entering_ND = hidden_ND.clone()
        for level, rows in remembered.items():
            entering_ND[rows] = self.memory[index][level - 1](feature_ND[rows]).to(entering_ND.dtype)
        return entering_ND
