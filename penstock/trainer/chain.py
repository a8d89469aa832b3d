"""EAGLE's modules over whole sequences: drafting a chain from every position at once.

Shapes: B sequences, n rows of each, N = B x rows at a step, D the drafter's hidden size, H query heads, K key heads,
G = H / K, d width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.trainer.batches import Batch


class ChainAttention:
    """Answers a module's attention calls, one call per step.

    Chain i begins at row i, whose feature is the target's, and goes on at row i + 1, i + 2, ... with what the module
    itself gave. As in the pipeline it sees the rows up to its beginning with the target's features, and its own:

        chain 2       row 0   row 1   row 2   row 3   row 4
        step 0 keys     x       x       x
        step 1 key                              x          (chain 2's, at row 3)
        step 2 key                                      x  (chain 2's, at row 4)

    Hence causal over the keys of step 0, and one diagonal for each later step (EAGLE-3, section 3.2).
    """

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(
        self, module: Any, query_HNd: Tensor, key_KNd: Tensor, value_KNd: Tensor, mask: None, *, scaling: float
    ) -> Tensor:
        """[N, H, d]"""
        query, key, value = (
            rows.unflatten(1, (self._sequences, -1)).transpose(0, 1) for rows in (query_HNd, key_KNd, value_KNd)
        )
        self._keys.append(key)
        self._values.append(value)
        if len(self._keys) == 1:
            output_BHnd = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=True
            )
        else:
            output_BHnd = self._later(query, scaling)
        return output_BHnd.transpose(1, 2).flatten(0, 1)

    def _later(self, query_BHnd: Tensor, scaling: float) -> Tensor:
        chains = query_BHnd.shape[2]
        query_BKGnd = query_BHnd.unflatten(1, (self._keys[0].shape[1], -1)) * scaling
        keys, values = ([part[:, :, None, :chains] for part in parts] for parts in (self._keys, self._values))
        hidden_nn = torch.ones(chains, chains, dtype=torch.bool, device=query_BHnd.device).triu(1)
        causal = (query_BKGnd @ keys[0].transpose(-1, -2)).float().masked_fill(hidden_nn, -torch.inf)
        own = [(query_BKGnd * key).sum(-1, keepdim=True).float() for key in keys[1:]]
        chances = torch.cat([causal, *own], dim=-1).softmax(-1).to(query_BHnd.dtype)
        output_BKGnd = chances[..., :chains] @ values[0]
        for i, value in enumerate(values[1:]):
            output_BKGnd = output_BKGnd + chances[..., chains + i, None] * value
        return output_BKGnd.flatten(1, 2)


def unroll(module: Any, batch: Batch, steps: int, noise_BnD: Tensor | None = None) -> Iterator[Tensor]:
    """What ``module`` gives at each step [B, n - step, D]: entry i is chain i's, at row i + step.

    Tokens are the text's; the feature of step 0 is the target's (plus ``noise_BnD``), of a later one the module's own
    output of the step before. Positions are those that the pipeline uses: row i turns by i.
    """
    tokens_Bn = batch.tokens_Bn
    sequences, rows = tokens_Bn.shape
    feature = module.fuse(batch.states_BnF)
    if noise_BnD is not None:
        feature = feature + noise_BnD
    attend = ChainAttention(sequences)
    for step in range(min(steps, rows)):
        positions = torch.arange(step, rows, device=tokens_Bn.device).expand(sequences, -1)
        given = (tokens_Bn[:, step:].flatten(), feature.flatten(0, 1), positions.flatten())
        hidden = module(*given, attend).unflatten(0, (sequences, -1))
        yield hidden
        feature = hidden[:, :-1]
