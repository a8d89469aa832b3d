"""Run strategies over a script on a modelled cluster, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.cluster import draft_link, draft_timing, link_timings, stage_timings
from penstock.cluster.spec import Cluster
from penstock.config import SpeculativeConfig
from penstock.core import FinishReason, SpeculationMetrics
from penstock.drafters.emulated import EmulatedDrafter
from penstock.engine.loop import EngineLoop
from penstock.engine.scheduler import Scheduler
from penstock.messages import Pick, Sampling
from penstock.pipeline.clock import VirtualClock
from penstock.pipeline.inprocess import InProcessPipeline
from penstock.requests.request import Request
from penstock.requests.slots import SlotPool
from penstock.simulator.drafter import ScriptedDrafter
from penstock.simulator.script import Script
from penstock.simulator.stage import SimulatedCore
from penstock.stage.driver import Line, StageDriver
from penstock.strategies import make_strategy

CHUNK = 128
SPECULATIVE_SLOTS = 4096


@dataclass
class Simulated:
    """One request under one strategy: seconds of virtual time per decoded token, and what it took."""

    tokens: int
    seconds: float
    first_token_seconds: float
    metrics: SpeculationMetrics


@dataclass
class Timed:
    """Collects when tokens came."""

    moments: list[float] = field(default_factory=list)

    def append(self, pick: Pick, at: float) -> FinishReason | None:
        self.moments.append(at)
        return None

    def finish(self, reason: FinishReason, at: float) -> None:
        pass


def simulate(cluster: Cluster, script: Script, speculation: SpeculativeConfig | None) -> list[Simulated]:
    """Every request of the script alone, one after the other, with one strategy."""
    loop = make_loop(cluster, script, drafting=speculation is not None)
    done = []
    for number, picks in enumerate(script.picks):
        timed = Timed()
        strategy = make_strategy(speculation, len(cluster.stages), loop.experience)
        started = loop.clock.now()
        request = Request(number, [0] * script.prompt, Sampling(), len(picks), frozenset(), strategy, timed)
        loop.add(request)
        while loop.busy:
            loop.step()
        loop.drain()
        first = timed.moments[0]
        done.append(Simulated(len(picks), timed.moments[-1] - first, first - started, request.metrics))
    return done


def make_loop(cluster: Cluster, script: Script, drafting: bool) -> EngineLoop:
    """An engine on modelled devices."""
    clock = VirtualClock()
    timings, links = stage_timings(cluster), link_timings(cluster)
    last = len(timings) - 1
    drivers = [
        StageDriver(i, SimulatedCore(script, i == last), clock.now, timing, links[i + 1], links[i])
        for i, timing in enumerate(timings)
    ]
    pipeline = InProcessPipeline(drivers, clock, Line(links[0]))
    drafter = None
    if drafting:
        timing = draft_timing(cluster)
        assert timing is not None
        drafter = EmulatedDrafter(ScriptedDrafter(script), timing, draft_link(cluster), clock)
    longest = script.prompt + max(map(len, script.picks))
    pool = SlotPool(longest, SPECULATIVE_SLOTS)
    return EngineLoop(pipeline, drafter, Scheduler(pool, len(timings), CHUNK, 1, longest), clock)
