"""All stages in the engine's own process: for one stage, for tests, and, under a virtual clock, for simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from penstock.messages import MOST, Batch, Cancel, Message, Result
from penstock.pipeline.base import Clock, StagePlan, TapSpec
from penstock.pipeline.engine_end import EngineEnd, entrance, load_layers, make_core, make_driver
from penstock.stage.driver import REAL_LINK, Link, Outgoing, StageDriver
from penstock.stage.visibility import ProtocolError


class InProcessPipeline:
    """Runs the stages whenever it is polled, as far as the clock allows.

    ``entrance`` is the link from the engine to the first stage. ``drafter`` is the one-stage pipeline of the learned
    drafter that reads these stages' features.
    """

    def __init__(
        self,
        drivers: Sequence[StageDriver],
        clock: Clock,
        entrance: Link = REAL_LINK,
        drafter: InProcessPipeline | None = None,
        vocab_size: int = MOST,
        exact: bool = False,
    ) -> None:
        self.exact = exact
        self._drafter = drafter
        self.stages = len(drivers)
        self.drivers = drivers
        self._clock = clock
        self._end = EngineEnd(clock, entrance, vocab_size)
        self._dues = [math.inf] * len(drivers)
        """Time at which each driver has something to do; asked again only after a message to it or a step of it."""

    @property
    def ready(self) -> bool:
        return self._end.ready

    def joined(self) -> bool:
        return True

    @property
    def lost(self) -> bool:
        return False

    @property
    def last_heartbeat(self) -> list[float]:
        """The present moment: the stages are as alive as the engine."""
        return [self._clock.now()] * self.stages

    @property
    def rank_bytes(self) -> list[list[int]]:
        return [[] for _ in range(self.stages)]

    def submit(self, batch: Batch) -> None:
        self.tell(0, batch, self._end.sending(batch))

    def cancel(self, message: Cancel) -> None:
        arrives = self._end.sending(message)
        for index in range(self.stages):
            self.tell(index, message, arrives)  # a batch that waits for features may now wait for fewer

    def prepare_grammar(self, request: int, grammar: str) -> None:
        """Do nothing: no other process could compile meanwhile. The last stage compiles when it needs a grammar."""

    def has_grammar(self, request: int) -> bool:
        return True

    def forget_grammar(self, request: int) -> None:
        pass

    def poll(self) -> list[Result]:
        self._work()
        return self._end.arrived()

    @property
    def due(self) -> float | None:
        due, of_engine = min(self._dues), self._end.due
        if of_engine is not None:
            return min(due, of_engine)
        return None if due == math.inf else due

    def tell(self, stage: int, message: Message, arrives: float = 0.0) -> None:
        self._hand_over(stage, message, None, arrives)

    def listen(self, listener: Callable[[Message], bool]) -> None:
        self._end.listener = listener

    def tap(self, layers: tuple[int, ...]) -> TapSpec:
        return TapSpec(layers=layers, address=self.address, session="")

    @property
    def address(self) -> str:
        """The pipeline's name among those of its process."""
        return str(id(self))

    def close(self) -> None:
        pass

    def release(self) -> None:
        pass

    def _work(self) -> None:
        """Let the stages do everything that is due by now, in the order of their moments."""
        # One driver at a time: what it sends may make another one due earlier than those that are looked at now. Of
        # equal moments the earlier stage's comes first.
        while (due := min(self._dues)) <= self._clock.now():
            index = self._dues.index(due)
            for sent in self.drivers[index].step():
                self._deliver(index, sent)
            self._ask_due(index)

    def _receive(self, message: Message, arrives: float) -> None:
        """Take in a stage's message to the engine."""
        if not self._end.received(message, arrives):
            raise ProtocolError(f"unexpected {type(message).__name__} to the engine")

    def _deliver(self, index: int, sent: Outgoing) -> None:
        if sent.to == "drafter":
            assert self._drafter is not None
            self._drafter._hand_over(0, sent.message, sent.tensor, sent.arrives)
            return
        # The engine is at both ends: -1 before the first stage, and one beyond the last.
        to = {"upstream": index - 1, "downstream": index + 1, "engine": self.stages}[sent.to]
        if 0 <= to < self.stages:
            self._hand_over(to, sent.message, sent.tensor, sent.arrives)
        else:
            self._receive(sent.message, sent.arrives)

    def _hand_over(self, index: int, message: Message, tensor: Any, arrives: float) -> None:
        self.drivers[index].on_message(message, tensor, arrives)
        self._ask_due(index)

    def _ask_due(self, index: int) -> None:
        due = self.drivers[index].due
        self._dues[index] = math.inf if due is None else due


class InProcessExecutor:
    """Runs whole engines, models included, in one process. Under a virtual clock all runs are alike."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pipelines: dict[str, InProcessPipeline] = {}
        """Address -> pipeline."""

    def now(self) -> float:
        return self._clock.now()

    def wait(self, until: float | None) -> None:
        self._clock.wait(until)

    def wake(self) -> None:
        self._clock.wake()

    def end_unused(self) -> None:
        pass

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> InProcessPipeline:
        layers = [load_layers(plan) for plan in plans]
        cores = [make_core(plan, i, len(plans), layers[i]) for i, plan in enumerate(plans)]
        drivers = [make_driver(plan, i, cores[i], self.now) for i, plan in enumerate(plans)]
        readers = [self._pipelines[plan.tap.address] for plan in plans if plan.tap is not None]
        reader = readers[0] if readers else None
        pipeline = InProcessPipeline(
            drivers, self, entrance(plans[0]), reader, plans[0].vocab_size, all(one.exact for one in layers)
        )
        self._pipelines[pipeline.address] = pipeline
        return pipeline

    def close(self) -> None:
        self._pipelines.clear()
