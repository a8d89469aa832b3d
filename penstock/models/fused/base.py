"""A stage's layers without their architecture's own way through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from penstock.models.fused.layer import FusedLayer
from penstock.models.fused.rotary import rotation_of


class FusedBase(nn.Module):
    """Called as the base model that it stands for, without the norm behind the layers.

    ``layers`` has an entry for every layer of the model, as the base model has; ``own`` are the stage's.
    """

    def __init__(self, embed: nn.Module, rotary: nn.Module, layers: nn.ModuleList, own: Sequence[FusedLayer]) -> None:
        super().__init__()
        self.embed_tokens = embed
        self.rotary_emb = rotary
        self.layers = layers
        self._own = tuple(own)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor,
        **options: Any,
    ) -> BaseModelOutput:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        heads = self._own[0].heads
        cos, sin = self.rotary_emb(hidden, position_ids)
        rotation = rotation_of(cos, sin, heads.rotated, heads.groups)
        for layer in self._own:
            hidden = layer(hidden, rotation)
        return BaseModelOutput(last_hidden_state=hidden)
