"""Attention in which nearly all rows see the same keys, and each row a few keys of its own.

Shapes: B sequences, n rows of each, H query heads, K key heads, G = H / K, d width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Keys:
    """Keys and values [B, K, n, d]; row t sees those at t - ``distance``."""

    key_BKnd: Tensor
    value_BKnd: Tensor
    distance: int = 0


def staircase(query_BHnd: Tensor, common: Keys, own: Sequence[Keys], scaling: float) -> Tensor:
    """Attention in which row t sees the common keys up to t - distance, and one of each ``own`` [B, H, n, d].

    It is one product for the common keys and a diagonal for each of the others, without a mask over all keys.
    """
    if not own:
        assert common.distance == 0
        return F.scaled_dot_product_attention(
            query_BHnd, common.key_BKnd, common.value_BKnd, is_causal=True, scale=scaling, enable_gqa=True
        )
    rows = query_BHnd.shape[2]
    query_BKGnd = query_BHnd.unflatten(1, (common.key_BKnd.shape[1], -1)) * scaling
    # True at [t, s] where s > t - distance: row t does not see that key.
    hidden_nn = torch.ones(rows, rows, dtype=torch.bool, device=query_BHnd.device).triu(1 - common.distance)
    keys, values = (part[:, :, None, :rows] for part in (common.key_BKnd, common.value_BKnd))
    scores = [(query_BKGnd @ keys.transpose(-1, -2)).float().masked_fill(hidden_nn, -torch.inf)]
    scores += [_diagonal(query_BKGnd, one) for one in own]
    chances = torch.cat(scores, dim=-1).softmax(-1).to(query_BHnd.dtype)
    output_BKGnd = chances[..., :rows] @ values
    for i, one in enumerate(own):
        # Column rows + i has the weight of each row's i-th own key.
        output_BKGnd = output_BKGnd + chances[..., rows + i, None] * _shifted(one.value_BKnd, one.distance, rows)
    return output_BKGnd.flatten(1, 2)


def _diagonal(query_BKGnd: Tensor, own: Keys) -> Tensor:
    """Each row's score with its own key [B, K, G, n, 1]; -inf where the sequence does not reach so far back."""
    rows = query_BKGnd.shape[3]
    scores = (query_BKGnd * _shifted(own.key_BKnd, own.distance, rows)).sum(-1, keepdim=True).float()
    lacking_n1 = torch.arange(rows, device=scores.device)[:, None] < own.distance
    return scores.masked_fill(lacking_n1, -torch.inf)


def _shifted(of_BKnd: Tensor, distance: int, rows: int) -> Tensor:
    """[B, K, 1, n, d]: the value at t - ``distance`` moved to t, with zeros before."""
    return F.pad(of_BKnd, (0, 0, distance, 0))[:, :, None, :rows]
