"""All stages in the engine's own process: for one stage, for tests, and, under a virtual clock, for simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.cluster.timing import LinkTiming
from penstock.messages import Batch, Cancel, Message, Occupied, Occupy, Ready, Result
from penstock.pipeline.base import Clock, EngineEnd
from penstock.pipeline.plan import StagePlan, TapSpec
from penstock.stage.driver import LinkModel, Outgoing, StageDriver


class InProcessPipeline:
    """Drives the stages whenever it is polled, as far as the clock allows.

    ``entrance`` is the emulated line from the engine to the first stage; ``drafter`` the pipeline, of one stage, of the
    learned drafter that reads these stages' features.
    """

    def __init__(
        self,
        drivers: Sequence[StageDriver],
        clock: Clock,
        entrance: LinkModel | None = None,
        drafter: InProcessPipeline | None = None,
    ) -> None:
        self._drafter = drafter
        self.stages = len(drivers)
        self.drivers = drivers
        self._clock = clock
        self._end = EngineEnd(clock, entrance or LinkModel(None))
        self._dues = [math.inf] * len(drivers)
        """When each driver has something to do: asked anew only after a message to it or a step of it."""

    @property
    def ready(self) -> bool:
        return self._end.ready

    @property
    def last_heartbeat(self) -> list[float]:
        """Now: the stages are as alive as the engine."""
        return [self._clock.now()] * self.stages

    def submit(self, batch: Batch) -> None:
        self._end.sending(batch)
        self._tell(0, batch)

    def cancel(self, message: Cancel) -> None:
        self._end.sending(message)
        for index in range(self.stages):
            self._tell(index, message)  # a batch that waits for features may now wait for less

    def poll(self) -> list[Result]:
        self._work()
        return self._end.arrived()

    @property
    def due(self) -> float | None:
        due, of_engine = min(self._dues), self._end.due
        if of_engine is not None:
            return min(due, of_engine)
        return None if due == math.inf else due

    def occupy(self, stage: int, message: Occupy) -> None:
        self._tell(stage, message)

    def occupied(self) -> Occupied | None:
        return self._end.occupied()

    def tap(self, layers: tuple[int, ...], link: LinkTiming | None) -> TapSpec:
        return TapSpec(layers=layers, address=self.address, session="", link=link)

    @property
    def address(self) -> str:
        """This pipeline's own among those of its process."""
        return str(id(self))

    def close(self) -> None:
        pass

    def _work(self) -> None:
        """Have the stages do everything that is due by now."""
        while (due := min(self._dues)) <= self._clock.now():
            index = self._dues.index(due)
            for sent in self.drivers[index].step():
                self._deliver(index, sent)
            self._ask_due(index)

    def _receive(self, message: Result | Ready | Occupied) -> None:
        """Take in what a stage has for the engine."""
        self._end.received(message)

    def _deliver(self, index: int, sent: Outgoing) -> None:
        if sent.to_drafter:
            assert self._drafter is not None
            self._drafter._tell(0, sent.message, sent.tensor)
            return
        if isinstance(sent.message, Occupied):
            self._receive(sent.message)
            return
        to = index - 1 if sent.upstream else index + 1
        if 0 <= to < self.stages:
            self._tell(to, sent.message, sent.tensor)
        else:
            assert isinstance(sent.message, Ready | Result)
            self._receive(sent.message)

    def _tell(self, index: int, message: Message, tensor: Any = None) -> None:
        self.drivers[index].on_message(message, tensor)
        self._ask_due(index)

    def _ask_due(self, index: int) -> None:
        due = self.drivers[index].due
        self._dues[index] = math.inf if due is None else due


class InProcessHost:
    """Runs whole engines, models included, in one process: under a virtual clock each run is the same."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pipelines: dict[str, InProcessPipeline] = {}
        """By address."""

    def now(self) -> float:
        return self._clock.now()

    def wait(self, until: float | None) -> None:
        self._clock.wait(until)

    def wake(self) -> None:
        self._clock.wake()

    def pipeline(self, plans: Sequence[StagePlan], name: str = "stage") -> InProcessPipeline:
        from penstock.pipeline.worker import load, make_driver

        drivers = [make_driver(plan, i, len(plans), load(plan), self.now) for i, plan in enumerate(plans)]
        readers = [self._pipelines[plan.tap.address] for plan in plans if plan.tap is not None]
        pipeline = InProcessPipeline(drivers, self, LinkModel(plans[0].up), readers[0] if readers else None)
        self._pipelines[pipeline.address] = pipeline
        return pipeline

    def close(self) -> None:
        self._pipelines.clear()
