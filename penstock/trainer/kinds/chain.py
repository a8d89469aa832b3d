"""EAGLE's modules and MTP heads over whole sequences, drafting a chain from every position at once.

Shapes: B sequences, n rows of each, N = B x rows at a step, D the drafter's hidden size, H query heads, K key heads, d
width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.trainer.data.batches import Batch
from penstock.trainer.kinds.attention import Keys, staircase
from penstock.trainer.kinds.base import DECAY
from penstock.trainer.kinds.distill import Teaching


class ChainAttention:
    """Computes a module's attention, one call per step.

    Chain i begins at row i, with the target's feature, and goes on at row i + 1, i + 2, ... with the module's own
    output. As in the pipeline it sees the rows up to its beginning with the target's features, and its own rows:

        chain 2       row 0   row 1   row 2   row 3   row 4
        step 0 keys     x       x       x
        step 1 key                              x          (chain 2's, at row 3)
        step 2 key                                      x  (chain 2's, at row 4)

    Attention is therefore causal over the keys of step 0, with one diagonal for each later step (EAGLE-3, section 3.2).
    Soft caps, sinks and windows of a target's layer are not taught.
    """

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences
        self._common: Keys | None = None
        self._own: list[Keys] = []

    def __call__(
        self,
        module: Any,
        query_HNd: Tensor,
        key_KNd: Tensor,
        value_KNd: Tensor,
        mask: None,
        *,
        scaling: float,
        **options: Any,
    ) -> Tensor:
        """The output of attention, [N, H, d]."""
        query, key, value = (
            rows.unflatten(1, (self._sequences, -1)).transpose(0, 1) for rows in (query_HNd, key_KNd, value_KNd)
        )
        if self._common is None:
            self._common = Keys(key, value)
        else:
            self._own.append(Keys(key, value))
        return staircase(query, self._common, self._own, scaling).transpose(1, 2).flatten(0, 1)


def unroll(module: Any, batch: Batch, steps: int, noise_BnD: Tensor | None = None) -> Iterator[Tensor]:
    """The output of ``module`` at each step [B, n - step, D]: entry i belongs to chain i, at row i + step.

    Tokens are the text's. The feature of step 0 is the target's (plus ``noise_BnD``), and of a later step the module's
    own output of the step before. Positions are those of the pipeline: row i turns by i.
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


class ChainTrainee(nn.Module):
    """A trainee (``base.Trainee``) distilled over its own drafts, step after step: EAGLE-3's training-time test."""

    def __init__(self, module: Any, head: nn.Module, steps: int, draft_ids_v: Tensor | None = None) -> None:
        super().__init__()
        self.module = module
        self.head = head
        self.steps = steps
        self.draft_ids_v = None if draft_ids_v is None else nn.Buffer(draft_ids_v, persistent=False)

    def forward(self, batch: Batch, seed: int) -> Tensor:
        teaching = Teaching(self.head, batch, self.draft_ids_v)
        steps = enumerate(self.unroll(batch, self.steps))
        losses = [DECAY**step * teaching.divergence(hidden, self.drafted) for step, hidden in steps]
        return torch.stack(losses).sum()

    def unroll(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        return unroll(self.module, batch, steps)

    def logits(self, step: int, hidden_nD: Tensor) -> Tensor:
        logits_nV: Tensor = self.module.logits(hidden_nD)
        return logits_nV

    def drafted(self, hidden_nD: Tensor) -> Tensor:
        """Logits over the tokens that can be drafted."""
        return self.logits(0, hidden_nD)
