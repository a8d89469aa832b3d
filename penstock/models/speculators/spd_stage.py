"""SPD's module as the stage core wants it: rows at their levels and the target's features in, candidates out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.messages import Candidates, Sampling
from penstock.models.attention import Arenas, Plan, SlotAttention, folded_kernel
from penstock.models.speculators.reader import FeatureReader
from penstock.stage.sampler import rank_candidates
from penstock.stage.visibility import BatchView, ProtocolError


class SpdStage(FeatureReader):
    """The speculation module over slots; implements ``stage.core.Layers`` and ``Reader``.

    A row is a token and its own feature, from states as deep as the row's level says. A token that has got further is
    computed anew under the same slot, so that what comes after it sees it as deep as it is now:

        step     x0  x1  x2  x3         rows of the batch
          1      g0                     x0
          2      g1  g0                 x0 x1
          3      g2  g1  g0             x0 x1 x2      (of a pipeline of two stages: g2 is the last word on x0)
          4      g2  g2  g1  g0            x1 x2 x3
    """

    def __init__(self, module: Any, reads: Sequence[int], width: int, capacity: int, dtype: str, device: str) -> None:
        super().__init__(module, reads, width, capacity, dtype, device)
        self._in_place = dtype == "float32" or self.device.type != "cpu"
        self._arenas = Arenas(capacity)

    @property
    def kv_bytes(self) -> int:
        """Size of the arenas; 0 before the first row."""
        return self._arenas.bytes

    def lacks(self, awaited: set[tuple[int, int]]) -> set[tuple[int, int]]:
        lacking = self.store.lacks({node for node, _ in awaited})
        if not lacking:
            return lacking
        level_of = dict(awaited)
        return {(node, state) for node, state in lacking if state in self.module.levels[level_of[node]]}

    @torch.inference_mode()
    def forward(self, view: BatchView, hidden: None) -> Tensor:
        """Compute the rows and store keys and values [N, D]."""
        if view.levels is None or not 0 <= view.levels.min() <= view.levels.max() < len(self.module.levels):
            raise ProtocolError(f"a row's level is outside the {len(self.module.levels)} of this drafter")
        self.register(view)
        levels_N = torch.from_numpy(view.levels)
        tokens_N = torch.from_numpy(view.tokens).to(self.device)
        feature_ND = torch.empty(len(view), self.hidden_size, dtype=self.dtype, device=self.device)
        for level in np.unique(view.levels).tolist():
            rows = torch.from_numpy(np.flatnonzero(view.levels == level)).to(self.device)
            states_NF = self.store.states(view.slots[view.levels == level])
            feature_ND[rows] = self.module.fuse(level, tokens_N[rows], states_NF).to(self.dtype)
        attend = SlotAttention(self._arenas, Plan(view, self.device, self._in_place), folded_kernel)
        positions_N = torch.from_numpy(view.positions).to(self.device)
        hidden_ND: Tensor = self.module(feature_ND, levels_N, positions_N, attend)
        return hidden_ND

    @torch.inference_mode()
    def candidates(
        self, view: BatchView, hidden: Tensor, wanted: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        """``count`` noise-ranked candidates after each row in ``wanted``."""
        positions, nodes = view.positions[list(wanted)] + 1, view.nodes[list(wanted)]
        logits_nV = self.module.logits(hidden[list(wanted)])
        return rank_candidates(logits_nV, samplings, positions.tolist(), nodes.tolist(), count)
