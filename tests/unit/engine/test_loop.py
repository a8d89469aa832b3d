"""What the loop tells the strategies of its drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from penstock.cluster.timing import DeviceTiming, StageTiming
from penstock.core import PenstockError
from penstock.drafters.base import Ask, Draft
from penstock.drafters.instant import InstantDrafter
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.messages import Sampling
from penstock.pipeline.clock import VirtualClock
from penstock.pipeline.inprocess import InProcessPipeline
from penstock.requests.request import Request
from penstock.requests.slots import SlotPool
from penstock.stage.core import StageCore
from penstock.stage.driver import StageDriver
from penstock.strategies.experience import Experience
from penstock.strategies.pipedec import PipeDec
from tests.hash_model import HashLayers
from tests.histories import Collected


class Rowless(InstantDrafter):
    """Has nothing to say, and needs no row for that."""

    asked = 0

    def ask(self, asks: Sequence[Ask]) -> int:
        self.asked += 1
        self._answers += [Draft(node, []) for ask in asks for node in ask.nodes]
        return 0


def test_a_drafter_that_is_not_busy_is_not_due() -> None:
    """Also when its answer took no row: a strategy would wait for an answer that never comes."""
    clock, pool, drafter = VirtualClock(), SlotPool(40, 20), Rowless()
    core = StageCore(HashLayers(0, pool.total, 4), pool.total, is_last=True)
    pipeline = InProcessPipeline([StageDriver(0, core, clock.now)], clock)
    loop = EngineLoop(pipeline, drafter, Scheduler(pool, 1, 8, 1, 40), clock)
    loop.add(Request(0, [1, 2, 3], Sampling(), 10, frozenset(), PipeDec(3, 2, 2), Collected()))
    while loop.busy:
        loop.step()
        assert drafter.busy == (loop.experience.draft_due < math.inf)
    assert drafter.asked > 1


def test_an_experience_is_changed_while_idle_only_and_left_as_it_was() -> None:
    clock, pool, drafter = VirtualClock(), SlotPool(40, 20), Rowless()
    second = StageTiming(devices=(DeviceTiming(1.0, 0.0, 0.0),))
    core = StageCore(HashLayers(0, pool.total, 4), pool.total, is_last=True)
    pipeline = InProcessPipeline([StageDriver(0, core, clock.now, second)], clock)
    loop = EngineLoop(pipeline, drafter, Scheduler(pool, 1, 8, 1, 40), clock)
    first, other = loop.experience, Experience()
    loop.add(Request(0, [1, 2, 3], Sampling(), 10, frozenset(), PipeDec(3, 2, 2), Collected()))
    loop.step()
    with pytest.raises(PenstockError, match="only while idle"):
        loop.consult(other)
    while loop.busy:
        loop.step()
    loop.drain()
    learned = first.miss_rate
    assert learned > 0.5
    loop.consult(other)
    assert other.pipeline.step(1) == loop.pace.until == 0.0, "nothing is known, so nothing is held"
    loop.add(Request(1, [1, 2, 3], Sampling(), 5, frozenset(), PipeDec(3, 2, 2), Collected()))
    while loop.busy:
        loop.step()
    assert other.pipeline.step(1) == 1.0
    assert first.miss_rate == learned
