"""SPD's module behind the stage core's interface: rows at their levels and the target's features to candidates."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.models.speculators.reader import AttendingReader
from penstock.stage.visibility import BatchView, ProtocolError


class SpdStage(AttendingReader):
    """The speculation module over slots; implements ``stage.core.Layers`` and ``Reader``.

    A row is a token and its own feature, from states of the depth that the row's level names. A token that has got
    further is computed again in the same slot, so that later rows see it at its present depth:

        step     x0  x1  x2  x3         rows of the batch
          1      g0                     x0
          2      g1  g0                 x0 x1
          3      g2  g1  g0             x0 x1 x2      (two stages: g2 is final for x0)
          4      g2  g2  g1  g0            x1 x2 x3
    """

    def missing_features(self, awaited: set[tuple[int, int]]) -> set[tuple[int, int]]:
        lacking = self.store.missing_features({node for node, _ in awaited})
        if not lacking:
            return lacking
        level_of = dict(awaited)
        return {(node, state) for node, state in lacking if state in self.module.levels[level_of[node]]}

    @torch.inference_mode()
    def forward(self, view: BatchView, hidden: None) -> Tensor:
        """Compute the rows, and store their keys and values. Returns the states [N, D]."""
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
        attend = self.attention(view)
        positions_N = torch.from_numpy(view.positions).to(self.device)
        hidden_ND: Tensor = self.module(feature_ND, levels_N, positions_N, attend)
        return hidden_ND
