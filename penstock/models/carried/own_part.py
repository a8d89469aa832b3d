"""Cuts tensors that hold something for every layer to a stage's own layers, so that nothing else is read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.carried.layout import OUTSIDE, carries, is_outside, per_layer_width
from penstock.models.quantization.table import Table, TableEmbedding


class TensorPart:
    """Some rows and columns of a tensor that has not been read yet; reading it reads only these."""

    def __init__(self, whole: Any, rows: slice, columns: slice) -> None:
        self._whole = whole
        self._index = rows, columns

    def get_dtype(self) -> str:
        return str(self._whole.get_dtype())

    def get_shape(self) -> list[int]:
        return [len(range(size)[part]) for size, part in zip(self._whole.get_shape(), self._index, strict=True)]

    def __getitem__(self, index: Any) -> Tensor:
        found: Tensor = self._whole[self._index][index]
        return found


def own_tensors(stored: Mapping[str, Any], config: Any, first: int, last: int) -> dict[str, Any]:
    """The ``stored`` tensors, with those of ``OUTSIDE`` cut to layers [first, last)."""
    if not carries(config):
        return dict(stored)
    width = per_layer_width(config)
    own, every = slice(first * width, last * width), slice(None)
    cuts = {"embed_tokens_per_layer.weight": (every, own), "per_layer_model_projection.weight": (own, every)}
    found = dict(stored)
    for name in filter(is_outside, stored):
        module_weight = ".".join(name.split(".")[-2:])
        if module_weight in cuts:
            found[name] = TensorPart(stored[name], *cuts[module_weight])
    return found


def keep_own(base: Any, config: Any, first: int, last: int) -> None:
    """Cut the modules beside the layers to those of [first, last), in place.

    The methods of ``base`` then look up and project the embeddings of these layers alone.
    """
    if first > 0 and hasattr(base, "altup_projections"):
        base.altup_projections = nn.ModuleList()
    if last < config.num_hidden_layers and hasattr(base, "altup_unembed_projections"):
        base.altup_unembed_projections = nn.ModuleList()
    if not per_layer_width(config):
        return
    if first == last:
        for name in OUTSIDE:
            setattr(base, name, nn.Identity())
        return
    # transformers' methods go by the number of layers in the configuration.
    width = (last - first) * per_layer_width(config)
    base.config = copy.copy(config)
    base.config.num_hidden_layers = last - first
    table, projection = base.embed_tokens_per_layer, base.per_layer_model_projection
    table.embedding_dim = projection.out_features = width
    table.weight = nn.Parameter(table.weight.new_empty(table.num_embeddings, width), requires_grad=False)
    projection.weight = nn.Parameter(torch.empty_like(projection.weight)[:width], requires_grad=False)


def quantize_own(base: Any, config: Any, layers: int) -> None:
    """Store the per-layer embeddings of a stage's ``layers`` as int8, in place."""
    if per_layer_width(config) and layers:
        base.embed_tokens_per_layer = PerLayerTable(base.embed_tokens_per_layer, layers)


class PerLayerTable(nn.Module):
    """Drop-in for an embedding of several layers [V, layers * width], quantised as if each had its own table.

    A layer's embedding therefore does not depend on which layers share its stage.
    """

    def __init__(self, embedding: nn.Embedding, layers: int) -> None:
        super().__init__()
        self._layers = layers
        embedding.weight = nn.Parameter(embedding.weight.reshape(layers * embedding.num_embeddings, -1), False)
        self.lookup = TableEmbedding(Table(embedding.weight), embedding)

    def forward(self, ids: Tensor) -> Tensor:
        """[..] -> [.., layers * width]"""
        # Row ``token * layers + layer`` of the reshaped table is one layer's embedding of a token.
        rows = ids[..., None] * self._layers + torch.arange(self._layers, device=ids.device)
        found: Tensor = self.lookup(rows).flatten(-2)
        return found
