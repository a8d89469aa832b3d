"""Medusa's heads behind the stage core's interface: each predicts one step further from the target's newest state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.messages import Candidates, Sampling
from penstock.models.speculators.reader import FeatureReader
from penstock.stage.processors import contexts_of
from penstock.stage.sampler import rank_candidates
from penstock.stage.visibility import BatchView


class MedusaStage(FeatureReader):
    """Implements ``stage.core.Layers`` and ``Reader``. A row is only a place in the tree: the heads see no token.

    The candidates after a row come from the nearest node above it whose state has arrived, by the head for that
    distance:

        state of y:  y -> root -> a -> b        head 0 after the root, head 1 after a, head 2 after b, ...

    A row beyond the last head gets no answer; once the root has moved on, it can be asked about again.
    """

    def __init__(self, module: Any, reads: Sequence[int], width: int, capacity: int, dtype: str, device: str) -> None:
        super().__init__(module, reads, width, capacity, dtype, device)
        self._parent_of = np.full(capacity, -1, dtype=np.int64)

    def forget(self) -> None:
        super().forget()
        self._parent_of[:] = -1

    def forward(self, view: BatchView, hidden: None) -> Tensor:
        """Only note the rows' slots and parents: nothing has to be computed. Returns [N, 0]."""
        self.register(view)
        self._parent_of[view.slots] = view.parents
        return torch.empty(len(view), 0)

    @torch.inference_mode()
    def candidates(
        self, view: BatchView, hidden: Tensor, wanted: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        """``count`` noise-ranked candidates after each row in ``wanted`` that a head reaches."""
        by_head: dict[int, list[tuple[int, int, Sampling]]] = {}
        for row, sampling in zip(wanted, samplings, strict=True):
            head, slot = self._source(int(view.parents[row]))
            if slot >= 0:
                by_head.setdefault(head, []).append((row, slot, sampling))
        answers = []
        for head, asked in by_head.items():
            rows, slots, of_rows = zip(*asked, strict=True)
            logits_nV = self.module.head_logits(head, self.store.states(np.array(slots)))
            positions, nodes = view.positions[list(rows)] + 1, view.nodes[list(rows)]
            contexts = contexts_of(view, rows, of_rows, self.grammars)
            answers += rank_candidates(logits_nV, of_rows, positions.tolist(), nodes.tolist(), count, contexts)
        return answers

    def _source(self, slot: int) -> tuple[int, int]:
        """The head, and the slot whose state it reads, for a row with its parent in ``slot``; slot -1 if none fits."""
        for head in range(self.module.heads):
            if slot < 0:
                break
            at = np.array([slot])
            if self.store.has(at, self.nodes_in(at))[0]:
                return head, slot
            slot = int(self._parent_of[slot])
        return 0, -1
