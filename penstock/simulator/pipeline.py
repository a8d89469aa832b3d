"""The simulated pipeline, whose stages work while the engine waits, and wake it only for what reaches it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.messages import Message
from penstock.pipeline.clock import VirtualClock
from penstock.pipeline.inprocess import InProcessPipeline
from penstock.simulator.shared_host import SharedDriver
from penstock.stage.device import Link
from penstock.stage.driver import StageDriver


class SimulatedPipeline(InProcessPipeline):
    """A pipeline under a virtual clock, and the clock of the engine at its end.

    An engine's actions depend only on what it is told and on the times at which it wants to be asked. Woken for every
    message between two stages, it would mostly find nothing to do.
    """

    def __init__(self, drivers: Sequence[StageDriver], clock: VirtualClock, entrance: Link) -> None:
        super().__init__(drivers, clock, entrance)
        self._time = clock
        self._told = False
        self._sharing = [driver.index for driver in drivers if isinstance(driver, SharedDriver)]
        """Stages of one host; the time at which one is done depends on the others."""

    @property
    def due(self) -> float | None:
        """When something will reach the engine, as far as it is under way; until then ``wait`` returns anyway."""
        return self._end.due

    def now(self) -> float:
        return self._time.now()

    def wait(self, until: float | None) -> None:
        """Let the stages work until this time, or until the first at which they have told the engine something."""
        self._told = False
        last = math.inf if until is None else until
        while not self._told and (due := min(self._dues)) <= last and due < math.inf:
            self._time.wait(due)
            self._work()
        if not self._told:
            self._time.wait(until)

    def wake(self) -> None:
        self._time.wake()

    def _receive(self, message: Message, arrives: float) -> None:
        super()._receive(message, arrives)
        self._told = True

    def _ask_due(self, index: int) -> None:
        # A step of one stage changes the times at which the others of its host are done.
        for stage in self._sharing or (index,):
            super()._ask_due(stage)
