"""Multi-token prediction (MTP): one more layer like the target's, over its last state and the next token's embedding.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; ``MtpModel`` of transformers; vLLM's qwen3_next_mtp.py. Shapes as
in layer.py.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.models.attention import Attend, attending
from penstock.models.carried.layout import carries
from penstock.models.checkpoint import Checkpoint
from penstock.models.gate import layer_types
from penstock.models.loader import EMBEDDING_FACTORS, PassThrough, load_module
from penstock.models.shards import layer_of, open_shard, slice_of
from penstock.models.speculators.weights import Stored
from penstock.models.text_part import Weights

LAYER: Final = "layer."
"""The prefix of the layer's own tensors in ``SpeculatorCheckpoint.tensors``."""
FULL: Final = "full_attention"


class Mtp(nn.Module):
    """An MTP head.

    A row is a token and the feature of the token before it; the output predicts the token's own feature.

    A feature is the target's final hidden state after its norm, or the output of the row before. ``base`` comes from
    ``load_base``, and ``layer`` is the layer in it. The target's ``norm`` is copied three times, for weights of their
    own. ``head`` gives logits over the target's vocabulary.
    """

    def __init__(self, base: Any, layer: nn.Module, norm: nn.Module, embed_tokens: nn.Module, head: nn.Module) -> None:
        super().__init__()
        width: int = base.config.hidden_size
        self.hidden_size = width
        self.embed_tokens = embed_tokens
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.eh_proj = nn.Linear(2 * width, width, bias=False, device="meta")
        self.layer = layer
        self.base = base
        self.head = head

    def fuse(self, features_NF: Tensor) -> Tensor:
        """The features [N, D] that rows take from the target's states [N, F]: here F = D, and they are the same."""
        return features_NF

    def forward(self, tokens_N: Tensor, feature_ND: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """The predicted features [N, D] of the rows' own tokens. ``attend`` stores keys and values: see ``Attend``."""
        embedding_ND = self.enorm(self.embed_tokens(tokens_N))
        hidden_ND = self.eh_proj(torch.cat([embedding_ND, self.hnorm(feature_ND)], dim=-1))
        with attending(attend):
            output = self.base(inputs_embeds=hidden_ND[None], position_ids=positions_N[None], use_cache=False)
        return self.norm(output.last_hidden_state[0])

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """The logits of the token after each row, float32 [n, V], from the output of ``forward``."""
        return self.head(hidden_nD)


def place_of(target: Checkpoint) -> int | None:
    """The last of the target's layers with full attention, which a head's layer resembles.

    None if there is none, or if layers pass on more than hidden states.
    """
    if carries(target.config):
        return None
    types = layer_types(target.config) or [FULL] * target.num_layers
    full = [place for place, kind in enumerate(types) if kind == FULL]
    return full[-1] if full else None


def tensors_of_layer(target: Checkpoint, place: int) -> dict[str, str]:
    """Name within the layer at ``place`` -> name in the target's checkpoint, for the layer's tensors."""
    names = [name for name in target.weights.names() if layer_of(name) == place]
    return {name.split(f"layers.{place}.", 1)[1]: name for name in names}


def load_base(target: Checkpoint, place: int, tensors: Mapping[str, Stored], dtype: str, device: str) -> Any:
    """The target's base model with only the layer at ``place``, made of ``tensors`` (by their names within the layer).

    Raises ConfigError for tensors that the layer lacks.
    """
    weights = _Swapped(target.weights, tensors_of_layer(target, place), tensors)
    causal = load_module(replace(target, weights=weights), place, place + 1, dtype, device)
    base = getattr(causal, target.parts.base)
    setattr(base, target.parts.embed, PassThrough())
    setattr(base, target.parts.norm, nn.Identity())
    for factor in EMBEDDING_FACTORS:
        if hasattr(base, factor):
            setattr(base, factor, 1.0)
    return base


class _Swapped:
    """``weights`` with one layer's tensors replaced."""

    def __init__(self, weights: Weights, layer: Mapping[str, str], tensors: Mapping[str, Stored]) -> None:
        """``layer`` maps names within the layer, as in ``tensors``, to names in the checkpoint."""
        some, name = next(iter(layer.items()))
        prefix = name.removesuffix(some)
        left_out = set(layer.values())
        self._weights = weights
        self._others = [name for name in weights.names() if name not in left_out]
        self._swapped = {f"{prefix}{inner}": stored for inner, stored in tensors.items()}
        self.bits = None

    @property
    def files(self) -> list[Path]:
        return self._weights.files

    def names(self) -> list[str]:
        return [*self._others, *self._swapped]

    def sizes(self) -> dict[str, int]:
        """Name -> number of elements, for every tensor."""
        with contextlib.ExitStack() as files:
            return {name: math.prod(found.get_shape()) for name, found in self.slices(self.names(), files).items()}

    def slices(self, names: Iterable[str], files: contextlib.ExitStack) -> dict[str, Any]:
        """Name -> tensor, not read yet, until ``files`` closes them."""
        wanted = list(names)
        found = self._weights.slices([name for name in wanted if name not in self._swapped], files)
        for name in wanted:
            if stored := self._swapped.get(name):
                opened = files.enter_context(open_shard(stored.file))
                found[name] = slice_of(opened, stored.file, stored.name)
        return found
