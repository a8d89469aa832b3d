"""A stage's layers for models whose rows carry more than hidden states; the layers are transformers' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.carried.altup import gather, spread
from penstock.models.carried.layout import EMBEDDED, HIDDEN, per_layer_width, pieces_before, streams

SharedStates = dict[str, tuple[Tensor, Tensor]]
"""Kind of layer -> keys and values [1, K, N, d] of the batch's rows."""


class CarryingBase(nn.Module):
    """Layers [first, last) of the ``base`` model of ``config``; the norm behind the layers has been taken out.

    A layer that reads another's keys and values gets those of the batch, as in transformers: the layer that makes them
    is on this stage, or the rows have carried them here.
    """

    def __init__(self, base: Any, config: Any, first: int, last: int) -> None:
        super().__init__()
        self.base = base
        self.layers = base.layers
        self._own = list(range(first, last))
        self._types = config.layer_types
        self._entering = pieces_before(config, first)
        self._leaving = None if last == config.num_hidden_layers else pieces_before(config, last)
        self._streams = streams(config)
        self._per_layer = per_layer_width(config) > 0 and first < last

    def forward(self, tokens_1N: Tensor, positions_1N: Tensor, carried_NX: Tensor | None) -> Tensor:
        """The rows' hidden states and all that they carry behind these layers, [N, Y]; after the last layer [N, D].

        ``carried_NX`` is what they carried before these layers; None on the first stage, which embeds the tokens.
        """
        hidden, embedded, shared = self._begin(tokens_1N) if carried_NX is None else self._unpack(carried_NX)
        per_layer = self._per_layer_inputs(tokens_1N, embedded) if self._per_layer else None
        turned: dict[str, Any] = {}
        for place, index in enumerate(self._own):
            kind = self._types[index]
            if kind not in turned:
                turned[kind] = self.base.rotary_emb(hidden, positions_1N, kind)
            hidden = self.layers[index](
                hidden,
                position_embeddings=turned[kind],
                per_layer_input=None if per_layer is None else per_layer[:, :, place],
                shared_kv_states=shared,
                attention_mask=None,
                position_ids=positions_1N,
            )
        return self._pack(hidden, embedded, shared)

    def _begin(self, tokens_1N: Tensor) -> tuple[Tensor, Tensor, SharedStates]:
        embedded = self.base.embed_tokens(tokens_1N)
        return spread(self.base, embedded) if self._streams > 1 else embedded, embedded, {}

    def _per_layer_inputs(self, tokens_1N: Tensor, embedded: Tensor) -> Tensor:
        """The per-layer embeddings of the stage's own layers, [1, N, own layers, width]."""
        found: Tensor = self.base.project_per_layer_inputs(embedded, self.base.get_per_layer_inputs(tokens_1N))
        return found

    def _unpack(self, carried_NX: Tensor) -> tuple[Tensor, Tensor, SharedStates]:
        sizes = [torch.Size(shape).numel() for shape in self._entering.values()]
        parts = zip(self._entering.items(), carried_NX.split(sizes, dim=-1), strict=True)
        found = {name: part.unflatten(-1, shape) for (name, shape), part in parts}
        hidden = found.pop(HIDDEN).transpose(0, 1)
        embedded = found.pop(EMBEDDED, carried_NX)[None]
        # [N, 2, K, d] -> keys and values [1, K, N, d] each.
        shared = {kind: (both.permute(1, 2, 0, 3)[:1], both.permute(1, 2, 0, 3)[1:]) for kind, both in found.items()}
        return hidden[:, None] if self._streams > 1 else hidden, embedded, shared

    def _pack(self, hidden: Tensor, embedded: Tensor, shared: SharedStates) -> Tensor:
        if self._leaving is None:
            return gather(self.base, hidden)[0] if self._streams > 1 else hidden[0]
        rows = embedded.shape[1]
        pieces = {HIDDEN: hidden.reshape(self._streams, rows, -1).transpose(0, 1), EMBEDDED: embedded[0]}
        for kind, (keys, values) in shared.items():
            pieces[kind] = torch.stack([keys[0], values[0]]).permute(2, 0, 1, 3)
        return torch.cat([pieces[name].reshape(rows, -1) for name in self._leaving], dim=-1)
