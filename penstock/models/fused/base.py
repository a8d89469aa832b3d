"""A stage's layers without the base model of their architecture around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from penstock.models.fused.rotary import rotation_of


class FusedBase(nn.Module):
    """Replaces the base model, and is called like it; the norm behind the layers is not included.

    ``layers`` has an entry for every layer of the model, as in the base model; ``own`` are the stage's.
    """

    def __init__(self, embed: nn.Module, rotary: nn.Module, layers: nn.ModuleList, own: Sequence[Any]) -> None:
        super().__init__()
        self.embed_tokens = embed
        self.rotary_emb = rotary
        self.layers = layers
        self.own = tuple(own)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor,
        **options: Any,
    ) -> BaseModelOutput:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return BaseModelOutput(last_hidden_state=self.through(hidden, self.turned(hidden, position_ids)))

    def turned(self, hidden: Tensor, position_ids: Tensor) -> Any:
        """The result of ``rotation`` for these positions; the tensor says in which format, and on which device."""
        return self.rotation(*self.rotary_emb(hidden, position_ids))

    def through(self, hidden: Tensor, rotation: Any) -> Tensor:
        """Run the rows through the stage's layers: [1, N, D] -> [1, N, D]."""
        for layer in self.own:
            hidden = layer(hidden, rotation)
        return hidden

    def rotation(self, cos_1Nd: Tensor, sin_1Nd: Tensor) -> Any:
        """The factors of a batch's rotary embedding in the form that the layers take."""
        heads = self.own[0].heads
        return rotation_of(cos_1Nd, sin_1Nd, heads.rotated, heads.groups)
