"""Distillation: the divergence of a drafter's distributions from the target's.

Shapes: B sequences, n rows, l of them that drafts stand for, m that are learned from, v tokens that can be drafted, V
the target's vocabulary, D the width of the logits' input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.trainer.data.batches import Batch


class Teaching:
    """The target's distributions at the rows of a batch that are learned from.

    With a vocabulary of the drafter's own, rows whose best token cannot be drafted are left out, and the distributions
    of the others are restricted to the tokens that can be drafted (SafeAILab/EAGLE's trainer).
    """

    def __init__(self, head: Callable[[Tensor], Tensor], batch: Batch, draft_ids_v: Tensor | None) -> None:
        with torch.no_grad(), torch.autocast(batch.final_BLD.device.type, enabled=False):
            taught_Bn = batch.learned_Bn.clone()
            logits = head(batch.final_BnD[taught_Bn])
            if draft_ids_v is not None:
                can_m = torch.isin(logits.argmax(-1), draft_ids_v)
                taught_Bn[batch.learned_Bn] = can_m
                logits = logits[can_m].index_select(1, draft_ids_v)
            log_chances_mv = logits.log_softmax(-1)
            self.taught_Bn = taught_Bn
            self._chances_mv = log_chances_mv.exp()
            self._entropy_m = -(self._chances_mv * log_chances_mv).sum(-1)
            # The index of each taught row among the taught rows, by which _chances_mv is ordered.
            self._place_Bn = taught_Bn.flatten().cumsum(0).view_as(taught_Bn) - 1

    def divergence(self, hidden_BlD: Tensor, logits: Callable[[Tensor], Any], among_Bn: Tensor | None = None) -> Tensor:
        """The KL divergence in nats from target to drafter, summed over the rows, or over those in ``among_Bn``.

        ``hidden_BlD`` stands for the last l rows; ``logits`` makes [m, v] from the selected ones [m, D].
        """
        taught_Bn = self.taught_Bn if among_Bn is None else self.taught_Bn & among_Bn
        first = taught_Bn.shape[1] - hidden_BlD.shape[1]
        taught = taught_Bn[:, first:]
        places = self._place_Bn[:, first:][taught]
        crossed = F.cross_entropy(logits(hidden_BlD[taught]).float(), self._chances_mv[places], reduction="sum")
        return crossed - self._entropy_m[places].sum()
