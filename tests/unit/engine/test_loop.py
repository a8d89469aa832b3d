"""What the loop tells the strategies of its drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
