"""The slow reference: a state in every slot, computed row by row along the path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.models.recurrent.plan import TreePlan
from penstock.models.recurrent.slots import SlotArrays
from penstock.models.recurrent.state import Rows


class SteppedState:
    """Computes the same as ``FoldedState``, straight from the definition."""

    def __init__(self, capacity: int) -> None:
        self.slots = SlotArrays(capacity)

    @property
    def bytes(self) -> int:
        return self.slots.bytes

    def forget(self, requests: Sequence[int]) -> None:
        """Do nothing: slots are overwritten when they are used again."""

    def read(self, rows: Rows, plan: TreePlan) -> Tensor:
        count, heads, width = rows.value_NHe.shape
        query_NHd, key_NHd = (
            one.repeat_interleave(heads // one.shape[1], dim=1) for one in (rows.query_NKd, rows.key_NKd)
        )
        self.slots.make("state", rows.value_NHe.new_zeros(0, heads, key_NHd.shape[2], width))
        output_NHe = torch.empty_like(rows.value_NHe)
        parents = plan.ancestors(1)
        for i in range(count):
            state_Hde = self.slots.get("state", parents[i])[0] * rows.decay_NHc[i].exp()[..., None]
            added_He = rows.value_NHe[i]
            if rows.beta_NH is not None:
                held_He = torch.einsum("hde,hd->he", state_Hde, key_NHd[i])
                added_He = rows.beta_NH[i][:, None] * (added_He - held_He)
            state_Hde = state_Hde + key_NHd[i][..., None] * added_He[:, None]
            self.slots.put("state", plan.slots_N[i : i + 1], state_Hde[None])
            output_NHe[i] = torch.einsum("hde,hd->he", state_Hde, query_NHd[i])
        return output_NHe
