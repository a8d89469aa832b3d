"""All stages in the engine's own process: for one stage, for tests, and, under a virtual clock, for simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.messages import Batch, Cancel, Message, Ready, Result
from penstock.pipeline.base import Clock, EngineEnd
from penstock.stage.driver import Line, Outgoing, StageDriver


class InProcessPipeline:
    """Drives the stages whenever it is polled, as far as the clock allows.

    ``entrance`` is the emulated line from the engine to the first stage; ``drafter`` the pipeline, of one stage, of the
    learned drafter that reads these stages' features.
    """

    def __init__(
        self,
        drivers: Sequence[StageDriver],
        clock: Clock,
        entrance: Line | None = None,
        drafter: InProcessPipeline | None = None,
    ) -> None:
        self._drafter = drafter
        self.stages = len(drivers)
        self._drivers = drivers
        self._clock = clock
        self._end = EngineEnd(clock, entrance or Line(None))
        self._dues = [math.inf] * len(drivers)
        """When each driver has something to do: asked anew only after a message to it or a step of it."""

    @property
    def ready(self) -> bool:
        return self._end.ready

    def submit(self, batch: Batch) -> None:
        self._end.sending(batch)
        self._tell(0, batch)

    def cancel(self, message: Cancel) -> None:
        self._end.sending(message)
        for driver in self._drivers:
            driver.on_message(message)

    def poll(self) -> list[Result]:
        while (due := min(self._dues)) <= self._clock.now():
            index = self._dues.index(due)
            for sent in self._drivers[index].step():
                self._deliver(index, sent)
            self._ask_due(index)
        return self._end.arrived()

    @property
    def due(self) -> float | None:
        due, of_engine = min(self._dues), self._end.due
        if of_engine is not None:
            return min(due, of_engine)
        return None if due == math.inf else due

    def close(self) -> None:
        pass

    def _deliver(self, index: int, sent: Outgoing) -> None:
        if sent.aside:
            assert self._drafter is not None
            self._drafter._tell(0, sent.message, sent.tensor)
            return
        to = index - 1 if sent.upstream else index + 1
        if 0 <= to < self.stages:
            self._tell(to, sent.message, sent.tensor)
        else:
            assert isinstance(sent.message, Ready | Result)
            self._end.received(sent.message)

    def _tell(self, index: int, message: Message, tensor: Any = None) -> None:
        self._drivers[index].on_message(message, tensor)
        self._ask_due(index)

    def _ask_due(self, index: int) -> None:
        due = self._drivers[index].due
        self._dues[index] = math.inf if due is None else due
