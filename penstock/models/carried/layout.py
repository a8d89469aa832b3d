"""The layout of what a row carries from one layer to the next, derived from the configuration alone.

Gemma 3n and 4 have layers near the end that read keys and values of an earlier one ("shared KV"), and layers that get
an embedding of their own for every token, projected together with the token's ordinary one ("per-layer embeddings").
Where a stage ends between such layers, both travel on beside the hidden states:

    [ hidden states | the token's embedding | keys and values of the sliding layer | those of the full one ]

The per-layer embeddings themselves do not travel: every stage looks up its own layers' columns by the token.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final

CARRYING: Final = frozenset({"gemma3n_text", "gemma4_text", "gemma4_unified_text"})
"""Model types that are known to carry these, and nothing else."""
HIDDEN: Final = "hidden"
EMBEDDED: Final = "embedded"
OUTSIDE: Final = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
"""Modules outside of the layers that every stage has a part of."""

Pieces = dict[str, tuple[int, ...]]
"""Name of a piece -> its shape, in the order in which the pieces lie in a row."""


@dataclass(frozen=True)
class SharedLayer:
    """A layer whose keys and values, ``heads`` of ``width``, are also read by later layers of its ``kind``."""

    kind: str
    layer: int
    last_reader: int
    heads: int
    width: int


def carries(config: Any) -> bool:
    """Whether rows of this model carry more than hidden states."""
    return config.model_type in CARRYING and (bool(shared_layers(config)) or per_layer_width(config) > 0)


def per_layer_width(config: Any) -> int:
    """How many numbers a token's embedding for one layer has; 0 if there are none."""
    return int(getattr(config, "hidden_size_per_layer_input", None) or 0)


def streams(config: Any) -> int:
    """How many hidden states a row has: several in Gemma 3n (alternating updates, arXiv 2301.13310), else 1."""
    return int(getattr(config, "altup_num_inputs", 1))


def readers(config: Any) -> range:
    """The layers without keys and values of their own."""
    layers = int(config.num_hidden_layers)
    return range(layers - int(getattr(config, "num_kv_shared_layers", None) or 0), layers)


def made_by(config: Any) -> dict[int, int]:
    """Layer without keys and values of its own -> the layer whose keys and values it reads."""
    return {
        reader: shared.layer
        for shared in shared_layers(config)
        for reader in readers(config)
        if config.layer_types[reader] == shared.kind
    }


def shared_layers(config: Any) -> list[SharedLayer]:
    """The layers whose keys and values later ones read: the last of each kind that has its own."""
    types, sharing = list(getattr(config, "layer_types", None) or ()), readers(config)
    found = []
    for kind in sorted({types[reader] for reader in sharing}):
        layer = max(index for index in range(sharing.start) if types[index] == kind)
        last_reader = max(reader for reader in sharing if types[reader] == kind)
        own = config.per_layer_config[layer] if hasattr(config, "per_layer_config") else config
        found.append(SharedLayer(kind, layer, last_reader, int(own.num_key_value_heads), int(own.head_dim)))
    return found


def pieces_before(config: Any, layer: int) -> Pieces:
    """The pieces that a row carries as it enters ``layer``; for the number of layers, as it leaves the last one."""
    behind = layer == config.num_hidden_layers
    pieces: Pieces = {HIDDEN: (1 if behind else streams(config), int(config.hidden_size))}
    if per_layer_width(config) and not behind:
        pieces[EMBEDDED] = (int(config.hidden_size),)
    for shared in shared_layers(config):
        # Keys and values travel from the layer behind their own to their last reader.
        if shared.layer < layer <= shared.last_reader:
            pieces[shared.kind] = (2, shared.heads, shared.width)
    return pieces


def row_width(config: Any, layer: int) -> int:
    """How many numbers a row carries as it enters ``layer``."""
    if not carries(config):
        return int(config.hidden_size)
    return sum(prod(shape) for shape in pieces_before(config, layer).values())


def is_outside(name: str) -> bool:
    """Whether a tensor of the checkpoint belongs to one of ``OUTSIDE``."""
    return any(part in OUTSIDE for part in name.split("."))
