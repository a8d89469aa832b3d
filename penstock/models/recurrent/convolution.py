"""A causal depthwise convolution along a row's path: a row gathers the inputs of its nearest ancestors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from penstock.models.recurrent.plan import TreePlan
from penstock.models.recurrent.slots import SlotArrays


class TreeConvolution(nn.Module):
    """Made from a ``Conv1d`` with a group for each channel. A slot stores its row's input."""

    def __init__(self, conv: Any, capacity: int) -> None:
        super().__init__()
        self.slots = SlotArrays(capacity)
        self.register_buffer("taps_KC", conv.weight.detach()[:, 0].T.contiguous())
        self.register_buffer("bias_C", None if conv.bias is None else conv.bias.detach())

    def forward(self, input_NC: Tensor, plan: TreePlan) -> Tensor:
        """[N, C] -> [N, C]"""
        taps_KC: Any = self.taps_KC
        self.slots.put("input", plan.slots_N, input_NC)
        output_NC = input_NC * taps_KC[-1]
        if len(taps_KC) > 1:
            above_NKC = self.slots.get("input", plan.ancestors(len(taps_KC) - 1))
            output_NC = output_NC + (above_NKC * taps_KC[:-1].flip(0)).sum(dim=1)
        return output_NC if self.bias_C is None else output_NC + self.bias_C
