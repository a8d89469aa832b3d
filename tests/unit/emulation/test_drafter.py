"""A drafter on a modelled device: when it answers, and what it waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from penstock.cluster.timing import DeviceTiming, LinkTiming, StageTiming
from penstock.drafters.base import DraftRequest
from penstock.drafters.merged import NgramDrafter
from penstock.emulation.cluster import DeviceTurns, EmulatedDrafter
from penstock.emulation.stage import StageEmulation, emulated_driver
from penstock.estimates.estimates import DraftTiming
from penstock.lab.script import profile_script
from penstock.lab.simulator import SimulatedCore
from penstock.messages import Batch, DeviceReserved, Rows
from penstock.pipeline.base import VirtualClock
from penstock.pipeline.engine_end import InProcessPipeline
from tests.unit.drafters.test_drafters import make_request


def test_an_emulated_drafter_answers_when_its_device_would() -> None:
    clock = VirtualClock()
    timing = StageTiming(devices=(DeviceTiming(0.001, 0.004, 0.001),))
    link = LinkTiming(0.0005, 1e6, 10)
    drafter = EmulatedDrafter(NgramDrafter(4, 1), timing, link, clock)
    request = make_request([1, 2, 1])
    drafter.ask([DraftRequest(request, [request.tree.root], 2)])
    expected = 0.001 + 0.004 + 2 * (0.0005 + 10 / 1e6)
    assert drafter.busy
    assert drafter.poll() == []
    assert drafter.due == pytest.approx(expected)
    clock.wait(drafter.due)
    assert [draft.candidates[0][0] for draft in drafter.poll()] == [2]
    assert not drafter.busy
    assert (drafter.asks, drafter.overruns) == (1, 0)


class Knowing(NgramDrafter):
    """A drafter that has the answer already, so that nothing leaves the engine."""

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        super().ask(asks)
        return 0


def test_an_answer_that_the_engine_has_takes_neither_link_nor_device() -> None:
    clock = VirtualClock()
    drafter = EmulatedDrafter(Knowing(4, 1), taking(1.0), LinkTiming(0.25, math.inf, 0.0), clock)
    request = make_request([1, 2, 1])
    assert drafter.ask([DraftRequest(request, [request.tree.root], 2)]) == 0
    assert [draft.candidates[0][0] for draft in drafter.poll()] == [2]
    assert not drafter.busy


def taking(seconds: float) -> StageTiming:
    return StageTiming(devices=(DeviceTiming(seconds, 0.0, 0.0),))


def test_an_emulated_drafter_waits_for_its_turn_on_a_stages_device() -> None:
    clock = VirtualClock()
    core = SimulatedCore(profile_script((0.5,), 1, 2, seed=0), is_last=True)
    stage = emulated_driver(0, core, clock.now, StageEmulation(timing=taking(3.0)))
    pipeline = InProcessPipeline([stage], clock)
    drafter = EmulatedDrafter(NgramDrafter(4, 1), taking(1.0), LinkTiming(0.25, math.inf, 0.0), clock)
    drafter.share(DeviceTurns(pipeline, 0))
    pipeline.submit(Batch(stream=0, rows=Rows([0], [1], [0], [-1], [0], [1]), alive=[0]))
    pipeline.poll()
    clock.wait(1.0)
    request = make_request([1, 2, 1])
    drafter.ask([DraftRequest(request, [request.tree.root], 2)])
    assert drafter.poll() == []
    assert drafter.due is None, "only the stage knows when its batch is done"
    clock.wait(3.0)
    pipeline.poll()
    assert drafter.poll() == []
    assert drafter.due == pytest.approx(3.0 + 1.0 + 0.25)
    assert drafter.timing == DraftTiming(device=1.75, computing=1.0, turn=DeviceReserved(stage=0, start=3.0, end=4.0))
    clock.wait(drafter.due)
    assert len(drafter.poll()) == 1
    assert (drafter.asks, drafter.overruns) == (1, 0)


class Reading(NgramDrafter):
    """A drafter whose features come at a moment of the test's choice."""

    features_at = 0.0

    @property
    def timing(self) -> DraftTiming:
        return DraftTiming(features_at=self.features_at)


@pytest.mark.parametrize(("features_at", "due", "waited"), [(0.0, 1.5, 0.0), (0.2, 1.5, 0.0), (2.0, 3.25, 1.75)])
def test_an_emulated_pass_begins_when_its_features_are_there(features_at: float, due: float, waited: float) -> None:
    clock, inner = VirtualClock(), Reading(4, 1)
    drafter = EmulatedDrafter(inner, taking(1.0), LinkTiming(0.25, math.inf, 0.0), clock)
    request = make_request([1, 2, 1])
    drafter.ask([DraftRequest(request, [request.tree.root], 2)])
    inner.features_at = features_at
    assert drafter.poll() == []
    assert drafter.due == pytest.approx(due)
    assert drafter.timing.features == pytest.approx(waited)
    clock.wait(drafter.due)
    assert len(drafter.poll()) == 1
    assert drafter.overruns == 0, "waiting for features is no fault of this host's"
