"""Multi-head latent attention with its compressed cache (DeepSeek-V2, arXiv 2405.04434, section 2.1).

A slot stores the latent of which the keys and values of all heads are made, r numbers, and s more that hold the
position and that all heads share. With U the layer's matrix from latents to a head's keys, and W that to its values,

    q . (U c)  =  (U^T q) . c          sum of p_i (W c_i)  =  W (sum of p_i c_i)

so each query is projected to the latents once (on the left: H heads' keys for every slot), and the attention's output
back once. Shapes: N rows, S slots, H heads, n and s the widths of a query without and with the position, e that of
values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from penstock.models.attention import Kernel, Scoring, Segment, SlotAttention
from penstock.models.fused import agree, sample_of, widened

MOST_EXPANDED: Final = 1 << 24
"""The most numbers of keys and values that are made of latents at once: 64 MiB in float32."""
ALL: Final = slice(None)


class Latent(nn.Module):
    """The matrices of one layer, in place of its ``kv_b_proj``."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.rank = int(attention.kv_lora_rank)
        self.width = int(attention.qk_nope_head_dim)
        weight_HXr = attention.kv_b_proj.weight.detach().view(attention.num_heads, -1, self.rank)
        # Buffers: they are neither a linear layer that would be packed, nor parameters that should have been.
        self.register_buffer("keys_Hnr", weight_HXr[:, : self.width], persistent=False)
        self.register_buffer("values_Her", weight_HXr[:, self.width :], persistent=False)
        own = weight_HXr.shape[1]
        self.cheaper_expanded = self.rank * own / (2 * self.rank - own) if 2 * self.rank > own else math.inf
        """From this many rows on, expanding latents to keys and values takes fewer products than projecting the
        queries.

        A head's n + e numbers take r products each for a slot; each row then takes n + e for it instead of 2 r.
        """

    def attend(
        self, kernel: Kernel, query_Hnx: Tensor, latents_1Sy: Tensor, segment: Segment, scoring: Scoring
    ) -> Tensor:
        """The output of ``kernel`` over the keys and values of the latents [1, S, r + s]; [H, rows, e]."""
        if query_Hnx.shape[1] >= self.cheaper_expanded:
            return self._attend_expanded(kernel, query_Hnx, latents_1Sy, segment, scoring)
        own, turned = query_Hnx.split([self.width, query_Hnx.shape[2] - self.width], dim=-1)
        query_Hny = torch.cat([own @ self.keys_Hnr, turned], dim=-1)
        # All heads share the latents as keys, and their first r numbers as values.
        found_Hnr = kernel(query_Hny, latents_1Sy, latents_1Sy[..., : self.rank], segment, scoring)
        return found_Hnr @ self.values_Her.transpose(1, 2)

    def _attend_expanded(
        self, kernel: Kernel, query_Hnx: Tensor, latents_1Sy: Tensor, segment: Segment, scoring: Scoring
    ) -> Tensor:
        """Attend with expanded keys and values, some heads at a time: all may take more memory than the cache."""
        each = latents_1Sy.shape[1] * (query_Hnx.shape[2] + self.values_Her.shape[1])
        step = max(1, MOST_EXPANDED // each)
        parts = [slice(head, head + step) for head in range(0, len(query_Hnx), step)]
        found = [kernel(query_Hnx[part], *self.expanded(latents_1Sy, part), segment, scoring) for part in parts]
        return torch.cat(found)

    def expanded(self, latents_1Sy: Tensor, heads: slice = ALL) -> tuple[Tensor, Tensor]:
        """Keys [heads, S, n + s] and values [heads, S, e] of latents [1, S, r + s]."""
        latents, turned = latents_1Sy[..., : self.rank], latents_1Sy[..., self.rank :]
        keys_HSn = latents @ self.keys_Hnr[heads].transpose(1, 2)
        keys = torch.cat([keys_HSn, turned.expand(len(keys_HSn), -1, -1)], dim=-1)
        return keys, latents @ self.values_Her[heads].transpose(1, 2)


class LatentAttention:
    """``attention`` for layers whose slots hold latents; ``latents`` maps a layer's number to its matrices."""

    def __init__(self, attention: SlotAttention, latents: dict[int, Latent]) -> None:
        self._attention = attention
        self._latents = latents

    def __call__(
        self, module: Any, query_HNx: Tensor, latents_1Ny: Tensor, nothing: Tensor, attention_mask: Any, **options: Any
    ) -> Tensor:
        latent, kernel = self._latents.get(module.layer_idx), self._attention.kernel
        if latent is None:
            return self._attention(module, query_HNx, latents_1Ny, nothing, attention_mask, **options)

        def over_latents(query: Tensor, kept: Tensor, _: Tensor, segment: Segment, scoring: Scoring) -> Tensor:
            return latent.attend(kernel, query, kept, segment, scoring)

        attention = SlotAttention(self._attention.arenas, self._attention.plan, over_latents)
        return attention(module, query_HNx, latents_1Ny, nothing, attention_mask, **options)


def keep_latents(layers: Sequence[Any]) -> dict[int, Latent]:
    """Let the layers with latent attention store only latents, in place. Returns their matrices by layer number.

    Layers that use a latent in another way stay as they are.
    """
    found = {}
    for layer in layers:
        attention: Any = getattr(layer, "self_attn", None)
        by_latents = type(getattr(attention, "kv_b_proj", None)) is nn.Linear and hasattr(attention, "expand_kv")
        if by_latents and makes_the_same(attention):
            latent = Latent(attention)
            attention.latent, attention.kv_b_proj = latent, nn.Identity()
            attention.expand_kv = unexpanded
            found[int(attention.layer_idx)] = latent
    return found


def unexpanded(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces transformers' ``expand_kv``: returns a row's latent [1, 1, N, r + s], and values of no width."""
    return torch.cat([kv_nope, k_rot], dim=-1), kv_nope[..., :0]


@torch.no_grad()
def makes_the_same(attention: Any) -> bool:
    """Whether transformers' module makes the same keys and values of some sample latents as ``Latent``."""
    if attention.kv_b_proj.bias is not None:
        return False
    wide: Any = widened(attention)
    latents = sample_of(wide.kv_b_proj.weight)
    turned = latents[..., :1].expand(-1, -1, int(wide.qk_rope_head_dim))
    expected = wide.expand_kv(latents[None], turned[None])
    found = Latent(wide).expanded(torch.cat([latents, turned], dim=-1))
    return all(agree(one, other[0]) for one, other in zip(found, expected, strict=True))
