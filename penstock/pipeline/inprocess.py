"""All stages in the engine's own process: for one stage, for tests, and, under a virtual clock, for simulation."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.messages import Batch, Cancel, Message, Ready, Result, encode
from penstock.pipeline.base import Clock
from penstock.stage.driver import Line, StageDriver


class InProcessPipeline:
    """Drives the stages whenever it is polled, as far as the clock allows.

    ``entrance`` is the emulated line from the engine to the first stage.
    """

    def __init__(self, drivers: Sequence[StageDriver], clock: Clock, entrance: Line | None = None) -> None:
        self.session = drivers[0].session
        self.stages = len(drivers)
        self._drivers = drivers
        self._clock = clock
        self._entrance = entrance or Line(None)
        self._free_at: float | None = 0.0
        self._results: list[Result] = []

    @property
    def ready(self) -> bool:
        return self._free_at is not None and self._free_at <= self._clock.now()

    def submit(self, batch: Batch) -> None:
        self._free_at = None
        batch.arrives = self._entrance.arrival(self._clock.now(), len(batch.rows), len(encode(batch)))
        self._drivers[0].on_message(batch)

    def cancel(self, message: Cancel) -> None:
        message.arrives = self._entrance.arrival(self._clock.now(), 0, len(encode(message)))
        for driver in self._drivers:
            driver.on_message(message)

    def poll(self) -> list[Result]:
        while any([self._run(driver) for driver in self._drivers]):
            pass
        now = self._clock.now()
        arrived = [result for result in self._results if result.arrives <= now]
        self._results = self._results[len(arrived) :]
        return arrived

    @property
    def due(self) -> float | None:
        moments = [driver.due for driver in self._drivers] + [result.arrives for result in self._results[:1]]
        if self._free_at is not None and self._free_at > self._clock.now():
            moments.append(self._free_at)
        return min((moment for moment in moments if moment is not None), default=None)

    def close(self) -> None:
        self._results.clear()

    def _run(self, driver: StageDriver) -> bool:
        outgoing = driver.step()
        for sent in outgoing:
            if sent.upstream:
                self._upstream(driver.index, sent.message)
            elif isinstance(sent.message, Result):
                self._results.append(sent.message)
            else:
                self._drivers[driver.index + 1].on_message(sent.message, sent.tensor)
        return bool(outgoing)

    def _upstream(self, index: int, message: Message) -> None:
        if index:
            self._drivers[index - 1].on_message(message)
        elif isinstance(message, Ready):
            self._free_at = message.arrives
