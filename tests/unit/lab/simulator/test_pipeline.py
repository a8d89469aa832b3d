"""Simulated time: nothing is different but how often the engine is woken."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster import random_cluster
from penstock.cluster.load import with_drafter_on
from penstock.engine.loop import EngineLoop
from penstock.lab import simulator
from penstock.lab.script import Script, profile_script
from penstock.pipeline.base import VirtualClock
from penstock.pipeline.engine_end import InProcessPipeline
from penstock.speculation import SpeculativeConfig
from penstock.stage.driver import Link, StageDriver
from penstock.strategies.base import STRATEGIES


class Polled(InProcessPipeline):
    """Differs from ``SimulatedPipeline`` in that the engine wakes for every event between the stages, too."""

    def __init__(self, drivers: Sequence[StageDriver], clock: VirtualClock, entrance: Link) -> None:
        super().__init__(drivers, clock, entrance)
        self.now, self.wait, self.wake = clock.now, clock.wait, clock.wake


@cache
def script_of(seed: int) -> Script:
    """To draw one takes as long as to simulate it."""
    return profile_script((0.6, 0.8, 0.9), 2, 12, seed=seed)


@settings(max_examples=settings().max_examples * 3 // 5)
@given(
    seed=st.integers(0, 10_000),
    stages=st.integers(2, 6),
    strategy=st.sampled_from([None, *STRATEGIES]),
    on_last_stage=st.booleans(),
)
def test_an_engine_that_sleeps_while_stages_work_misses_nothing(
    seed: int, stages: int, strategy: str | None, on_last_stage: bool
) -> None:
    cluster = random_cluster(seed, stages)
    if on_last_stage:
        cluster = with_drafter_on(cluster, "last-stage")
    script = script_of(seed % 8)
    config = None if strategy is None else SpeculativeConfig(strategy=strategy)
    steps = 0

    def counted(loop: EngineLoop) -> None:
        nonlocal steps
        steps += 1
        step(loop)

    found: list[tuple[Any, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        step = EngineLoop.step
        patch.setattr(EngineLoop, "step", counted)
        for pipeline in (simulator.SimulatedPipeline, Polled):
            steps = 0
            patch.setattr(simulator, "SimulatedPipeline", pipeline)
            found.append((simulator.simulate(cluster, script, config), steps))
    (asleep, few), (woken, many) = found
    assert asleep == woken
    assert few < many
