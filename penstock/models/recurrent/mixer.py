"""The base of the modules that replace a layer's state-carrying part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.recurrent.convolution import TreeConvolution
from penstock.models.recurrent.plan import TreePlan
from penstock.models.recurrent.slots import SlotArrays
from penstock.models.recurrent.state import State
from penstock.stage.visibility import BatchView


class Host:
    """The state that all mixers of a stage share: the present batch, and the number of slots."""

    def __init__(self, capacity: int, device: torch.device, new_state: Callable[[int], State]) -> None:
        """``new_state`` makes a layer's state for a number of slots."""
        self.capacity = capacity
        self.device = device
        self._new_state = new_state
        self.mixers: list[Mixer] = []
        self._plan: TreePlan | None = None
        self._begun: set[int] = set()
        """Requests that have had rows and have not ended."""

    def like(self, capacity: int) -> Host:
        """Another host, without mixers, whose states are of the same kind."""
        return Host(capacity, self.device, self._new_state)

    def begin(self, view: BatchView) -> None:
        """Set the batch whose rows come next."""
        if not self.mixers:
            return
        self._plan = TreePlan(view, self.capacity, self.device)
        self._begun.update(one.request for one in view.views)
        self._begun.difference_update(view.closed)
        for mixer in self.mixers:
            mixer.forget(view.closed)

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` slots. Slots that exist keep their contents."""
        if capacity == self.capacity:
            return
        self.capacity = capacity
        for mixer in self.mixers:
            for slots in mixer.slots:
                slots.grow(capacity)

    @property
    def plan(self) -> TreePlan:
        assert self._plan is not None, "a batch has begun"
        return self._plan

    def new_state(self) -> State:
        return self._new_state(self.capacity)

    @property
    def bytes(self) -> int:
        """Bytes of everything that is stored by slot."""
        return sum(mixer.bytes for mixer in self.mixers)

    def zero(self) -> None:
        """Reset everything, as if no row had ever come."""
        for mixer in self.mixers:
            for slots in mixer.slots:
                slots.zero()
            mixer.forget(tuple(self._begun))
        self._begun.clear()


class Mixer(nn.Module):
    """Called like the transformers module that it replaces; ``calls`` counts the calls."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host
        self.calls = 0

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """[1, N, D] -> [1, N, D]"""
        self.calls += 1
        return self.mix(hidden_states[0], self.host.plan)[None]

    def mix(self, hidden_ND: Tensor, plan: TreePlan) -> Tensor:
        """Compute the rows of the present batch: [N, D] -> [N, D]."""
        raise NotImplementedError

    @property
    def slots(self) -> list[SlotArrays]:
        """All arrays that are stored by slot."""
        raise NotImplementedError

    def forget(self, requests: Sequence[int]) -> None:
        """Drop the state of requests that have ended."""

    @property
    def bytes(self) -> int:
        return sum(slots.bytes for slots in self.slots)


class StatefulMixer(Mixer):
    """A mixer with a short convolution before its state."""

    def __init__(self, host: Host, conv: Any) -> None:
        super().__init__(host)
        self.state = host.new_state()
        self.convolution = TreeConvolution(conv, host.capacity)

    @property
    def slots(self) -> list[SlotArrays]:
        return [self.convolution.slots, self.state.slots]

    def forget(self, requests: Sequence[int]) -> None:
        self.state.forget(requests)
