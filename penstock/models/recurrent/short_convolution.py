"""Gated short convolutions of LFM2, whose whole state is a few inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from penstock.models.recurrent.convolution import TreeConvolution
from penstock.models.recurrent.mixer import Host, Mixer
from penstock.models.recurrent.plan import TreePlan
from penstock.models.recurrent.slots import SlotArrays


class ShortConvolution(Mixer):
    def __init__(self, own: Any, host: Host) -> None:
        super().__init__(host)
        self.convolution = TreeConvolution(own.conv, host.capacity)
        self.in_proj, self.out_proj = own.in_proj, own.out_proj

    @property
    def slots(self) -> list[SlotArrays]:
        return [self.convolution.slots]

    def mix(self, hidden_ND: Tensor, plan: TreePlan) -> Tensor:
        before_ND, after_ND, input_ND = self.in_proj(hidden_ND).chunk(3, dim=-1)
        mixed: Tensor = self.out_proj(after_ND * self.convolution(before_ND * input_ND, plan))
        return mixed
