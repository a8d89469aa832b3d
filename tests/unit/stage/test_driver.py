"""A chain of stages under random time: one batch per buffer, stream order, nothing lost, no waiting for nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster.timing import DeviceTiming, LinkTiming, StageTiming
from penstock.core import PenstockError
from penstock.emulation.stage import StageEmulation, emulated_driver
from penstock.messages import (
    NO_SLOT,
    Batch,
    Cancel,
    Features,
    Opened,
    Ready,
    Result,
    Rows,
    Sampling,
    Stop,
)
from penstock.pipeline.base import VirtualClock
from penstock.stage.driver import StageCore, StageDriver
from tests.hash_model import HashLayers, HashReader, HiddenRows

seconds = st.sampled_from([0.0, 0.001, 0.25, 1.0, 3.0])


def batch(stream: int) -> Batch:
    """One row of a request of its own."""
    rows = Rows([stream], [stream], [stream], [NO_SLOT], [0], [stream % 7])
    return Batch(stream=stream, opened=[Opened(stream, Sampling())], rows=rows, wanted=[0], alive=[0])


def stage_timing(fixed: float, per_row: float = 0.0) -> StageTiming:
    return StageTiming(devices=(DeviceTiming(fixed, 0.0, per_row),))


def link(latency: float) -> LinkTiming:
    return LinkTiming(latency, 1e6, 0.0)


def driver(index: int, stages: int, clock: VirtualClock, slots: int = 64, **emulation: Any) -> StageDriver:
    """A real stage, or one of which something is modelled."""
    core = StageCore(HashLayers(index, slots, 7), slots, is_last=index == stages - 1)
    return emulated_driver(index, core, clock.now, StageEmulation(**emulation))


class Chain:
    """Stages joined in the plainest way; checks every hop's buffer as messages are handed over."""

    def __init__(self, timings: list[tuple[float, float, float]], slots: int) -> None:
        self.clock = VirtualClock()
        self.drivers = [
            driver(i, len(timings), self.clock, slots, timing=stage_timing(own), down=link(down), up=link(up))
            for i, (own, down, up) in enumerate(timings)
        ]
        self.credit = True
        self.results: list[Result] = []

    def advance(self) -> bool:
        """Do everything that is due now; returns whether anything happened."""
        happened = False
        for place, one in enumerate(self.drivers):
            for sent in one.step():
                happened = True
                to = place - 1 if sent.to == "upstream" else place + 1
                if to < 0:
                    assert isinstance(sent.message, Ready)
                    self.credit = True
                elif to == len(self.drivers):
                    assert isinstance(sent.message, Result)
                    self.results.append(sent.message)
                else:
                    self.drivers[to].on_message(sent.message, sent.tensor, sent.arrives)
        return happened

    def run(self, batches: list[Batch]) -> None:
        waiting = list(batches)
        while len(self.results) < len(batches):
            if waiting and self.credit:
                self.credit = False
                self.drivers[0].on_message(waiting.pop(0))
            if not self.advance():
                due = [one.due for one in self.drivers if one.due is not None]
                assert due, "nothing is due: a batch was lost"
                self.clock.wait(min(due))


@settings(max_examples=150)
@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=5), st.integers(1, 12))
def test_batches_come_out_in_order_and_none_is_lost(timings: list[tuple[float, float, float]], count: int) -> None:
    chain = Chain(timings, slots=count)
    chain.run([batch(stream) for stream in range(count)])
    assert [result.stream for result in chain.results] == list(range(count))
    for result in chain.results:
        assert [pick.node for pick in result.picks] == [result.stream]
        assert [span.stage for span in result.spans] == list(range(len(timings)))
        for span, following in pairwise(result.spans):
            assert span.received <= span.start <= span.end <= following.received
    for stage in range(len(timings)):
        spans = [result.spans[stage] for result in chain.results]
        assert all(one.end <= other.start for one, other in pairwise(spans)), "one at a time"
    assert not any(one._buffer or one._done or one._leaving for one in chain.drivers)


def test_a_full_pipeline_works_on_as_many_batches_as_it_has_stages() -> None:
    """With stages of one second and no links, a batch comes out every second after the first three."""
    chain = Chain([], slots=10)
    chain.drivers = [driver(i, 3, chain.clock, 10, timing=stage_timing(1.0)) for i in range(3)]
    chain.run([batch(stream) for stream in range(10)])
    assert chain.clock.now() == pytest.approx(12.0)


def test_ready_is_said_before_the_batch_is_computed() -> None:
    """The early ``Ready`` lets the next batch travel while this one is computed."""
    clock = VirtualClock()
    one = driver(0, 2, clock)
    one.on_message(batch(0))
    steps = one.step()
    first = next(steps)
    assert first.to == "upstream"
    assert isinstance(first.message, Ready)
    assert one.core._cancels.next_stream == 0
    assert [type(sent.message) for sent in steps] == [Batch]


def test_a_second_batch_in_the_buffer_is_refused() -> None:
    one = driver(3, 5, VirtualClock())
    one.on_message(batch(0))
    with pytest.raises(PenstockError, match="stage 3: batch 1 arrived before its buffer was free"):
        one.on_message(batch(1))


@pytest.mark.parametrize("message", [Stop(), Result(stream=0)])
def test_other_messages_are_refused(message: Any) -> None:
    with pytest.raises(PenstockError, match="unexpected"):
        driver(0, 1, VirtualClock()).on_message(message)


def test_nothing_is_sent_on_before_the_next_buffer_is_free() -> None:
    clock = VirtualClock()
    one = driver(0, 2, clock)
    one.on_message(batch(0))
    assert [type(sent.message) for sent in one.step()] == [Ready, Batch]
    one.on_message(batch(1))
    assert [type(sent.message) for sent in one.step()] == [Ready]
    assert one.due is None
    one.on_message(Ready(stage=1), arrives=4.0)
    assert one.due == 4.0
    assert list(one.step()) == []
    clock.wait(4.0)
    (sent,) = one.step()
    assert isinstance(sent.message, Batch)
    assert sent.message.stream == 1


def test_what_leaves_is_complete_before_its_moment() -> None:
    """Its arrival time is known as soon as the next buffer's is, so that the message can be packed ahead."""
    clock = VirtualClock()
    first = driver(0, 2, clock, timing=stage_timing(1.0), down=link(0.25))
    for stream, credit in enumerate((None, 0.5, 5.0)):  # known from the start, in time, too late
        if credit is not None:
            first.on_message(Ready(stage=1), arrives=credit)
        started = clock.now()
        first.on_message(batch(stream))
        assert [type(sent.message) for sent in first.step()] == [Ready]
        leaving = first.leaving
        assert leaving is not None
        assert isinstance(leaving.message, Batch)
        moment = max(started + 1.0, credit or 0.0)
        assert leaving.arrives == pytest.approx(moment + 0.25, abs=1e-3)
        assert first.leave() is None
        clock.wait(moment)
        assert first.leave() is leaving
        assert first.leaving is None


def test_a_cancel_counts_from_its_arrival() -> None:
    clock = VirtualClock()
    one = driver(0, 1, clock)
    one.on_message(Cancel(before=5, nodes=[0, 1]), arrives=2.0)
    one.on_message(batch(0))
    assert [result.picks != [] for result in (sent.message for sent in one.step()) if isinstance(result, Result)] == [
        True
    ]
    clock.wait(2.0)
    one.on_message(batch(1))
    assert [result.picks for result in (sent.message for sent in one.step()) if isinstance(result, Result)] == [[]]


def test_a_batch_in_the_buffer_waits_for_its_link_and_for_its_stage() -> None:
    clock = VirtualClock()
    one = driver(0, 1, clock, timing=stage_timing(1.0, per_row=0.5))
    one.on_message(batch(0), arrives=3.0)
    assert one.due == 3.0
    clock.wait(3.0)
    assert [type(sent.message) for sent in one.step()] == [Ready]
    assert one.due == 4.5
    clock.wait(4.5)
    (sent,) = one.step()
    assert isinstance(sent.message, Result)
    (span,) = sent.message.spans
    assert (span.received, span.start, span.end, span.modelled, span.rows) == (3.0, 3.0, 4.5, 1.5, 1)


def reader(clock: VirtualClock) -> StageDriver:
    """A learned drafter that reads the outputs of the target's stages 0 and 1, with the rows of request 0 in order."""
    core = StageCore(HashReader(64, 7, [0, 1]), 64, is_last=True)
    core.reader = core.layers  # type: ignore[assignment]
    return StageDriver(0, core, clock.now)


def features(node: int, layer: int) -> Features:
    return Features(layers=[layer], nodes=[node], slots=[node])


def asking(stream: int = 0) -> Batch:
    """Node 1 and its child 2, which cannot do without the features of node 1."""
    rows = Rows([0, 0], [1, 2], [1, 2], [NO_SLOT, 1], [0, 1], [5, 6])
    opened = [Opened(0, Sampling())]
    return Batch(stream=stream, opened=opened, rows=rows, wanted=[1], candidates=2, feature_nodes=[0, 1], alive=[0, 1])


def test_a_drafter_waits_until_all_features_that_its_rows_need_have_arrived() -> None:
    clock = VirtualClock()
    one = reader(clock)
    one.on_message(features(1, 0), HiddenRows([7]))
    one.on_message(asking())
    assert one.due is None
    assert list(one.step()) == []
    one.on_message(features(1, 1), HiddenRows([8]), arrives=3.0)
    assert one.due == 3.0
    assert list(one.step()) == []
    clock.wait(3.0)
    ready, result = one.step()
    assert isinstance(ready.message, Ready)
    assert isinstance(result.message, Result)
    assert [answer.node for answer in result.message.candidates] == [2]


def test_a_cancelled_row_waits_for_no_features() -> None:
    one = reader(VirtualClock())
    one.on_message(asking())
    assert one.due is None
    one.on_message(Cancel(before=1, nodes=[1, 2]))
    assert one.due == 0.0
    _, result = one.step()
    assert isinstance(result.message, Result)
    assert result.message.candidates == []


def test_features_that_nobody_reads_end_the_pipeline() -> None:
    one = driver(0, 1, VirtualClock())
    one.on_message(features(1, 0), HiddenRows([7]))
    one.on_message(batch(0))
    with pytest.raises(PenstockError, match="reads none"):
        list(one.step())


def test_tapped_states_leave_aside_when_the_stage_is_done() -> None:
    clock = VirtualClock()
    core = StageCore(HashLayers(0, 64, 7), 64, is_last=False, taps=[4])
    one = emulated_driver(0, core, clock.now, StageEmulation(timing=stage_timing(2.0), to_drafter=link(0.5)))
    one.on_message(batch(0))
    _, aside = one.step()
    assert aside.to == "drafter"
    assert isinstance(aside.message, Features)
    assert (aside.message.layers, aside.message.nodes, aside.message.slots) == ([4], [0], [0])
    assert aside.arrives == pytest.approx(2.5, abs=1e-3)
    assert len(aside.tensor) == 1


def test_each_layers_state_of_a_row_weighs_on_the_line_aside() -> None:
    arrivals = []
    for taps in ([4], [2, 4]):
        clock = VirtualClock()
        core = StageCore(HashLayers(0, 64, 7), 64, is_last=False, taps=taps)
        one = emulated_driver(
            0, core, clock.now, StageEmulation(timing=stage_timing(2.0), to_drafter=LinkTiming(0.5, 1e6, 1e6))
        )
        one.on_message(batch(0))
        _, aside = one.step()
        assert isinstance(aside.message, Features)
        arrivals.append(aside.arrives)
    assert arrivals == pytest.approx([3.5, 4.5], abs=1e-3)


def test_a_span_says_when_features_had_arrived() -> None:
    clock = VirtualClock()
    core = StageCore(HashLayers(0, 64, 7), 64, is_last=True, taps=[4])
    sender = emulated_driver(0, core, clock.now, StageEmulation(timing=stage_timing(2.0), to_drafter=link(0.5)))
    sender.on_message(batch(0))
    clock.wait(0.0)
    list(sender.step())
    clock.wait(2.0)
    (sent,) = sender.step()
    assert isinstance(sent.message, Result)
    assert sent.message.spans[0].features == pytest.approx(2.5, abs=1e-3)
    one = reader(clock)
    one.on_message(asking())
    for layer, arrives in ((0, 2.25), (1, 3.0)):
        one.on_message(features(1, layer), HiddenRows([7]), arrives)
    clock.wait(3.0)
    _, answer = one.step()
    assert isinstance(answer.message, Result)
    (span,) = answer.message.spans
    assert (span.received, span.start, span.features) == (2.0, 3.0, 3.0)
