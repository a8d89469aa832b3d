"""All stages in the engine's own process: for one stage, for tests, and, under a virtual clock, for simulation."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.messages import Batch, Cancel, Ready, Result
from penstock.pipeline.base import Clock, EngineEnd
from penstock.stage.driver import Line, Outgoing, StageDriver


class InProcessPipeline:
    """Drives the stages whenever it is polled, as far as the clock allows.

    ``entrance`` is the emulated line from the engine to the first stage.
    """

    def __init__(self, drivers: Sequence[StageDriver], clock: Clock, entrance: Line | None = None) -> None:
        self.stages = len(drivers)
        self._drivers = drivers
        self._end = EngineEnd(clock, entrance or Line(None))

    @property
    def ready(self) -> bool:
        return self._end.ready

    def submit(self, batch: Batch) -> None:
        self._end.sending(batch)
        self._drivers[0].on_message(batch)

    def cancel(self, message: Cancel) -> None:
        self._end.sending(message)
        for driver in self._drivers:
            driver.on_message(message)

    def poll(self) -> list[Result]:
        while outgoing := [(driver.index, sent) for driver in self._drivers for sent in driver.step()]:
            for index, sent in outgoing:
                self._deliver(index, sent)
        return self._end.arrived()

    @property
    def due(self) -> float | None:
        moments = [driver.due for driver in self._drivers] + [self._end.due]
        return min((moment for moment in moments if moment is not None), default=None)

    def close(self) -> None:
        pass

    def _deliver(self, index: int, sent: Outgoing) -> None:
        to = index - 1 if sent.upstream else index + 1
        if 0 <= to < self.stages:
            self._drivers[to].on_message(sent.message, sent.tensor)
        else:
            assert isinstance(sent.message, Ready | Result)
            self._end.received(sent.message)
