"""The in-process pipeline, and the engine's end that all pipelines share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.core import PenstockError
from penstock.emulation.link import LinkModel
from penstock.emulation.stage import StageEmulation, emulated_driver
from penstock.messages import NO_SLOT, Batch, Cancel, Candidates, Opened, Ready, Result, Rows, SampledToken, Sampling
from penstock.pipeline.clock import VirtualClock
from penstock.pipeline.engine_end import EngineEnd
from penstock.pipeline.inprocess import InProcessPipeline
from penstock.stage.core import StageCore
from penstock.stage.device import REAL_LINK
from penstock.stage.visibility import ProtocolError
from tests.hash_model import HashLayers, plain_next
from tests.unit.stage.test_driver import link, stage_timing

PROMPT = [3, 1, 4, 1, 5]


def pipeline_of(stages: int, clock: VirtualClock, seconds: float = 1.0) -> InProcessPipeline:
    drivers = []
    for index in range(stages):
        core = StageCore(HashLayers(index, 32, 50), 32, is_last=index == stages - 1)
        drivers.append(emulated_driver(index, core, clock.now, StageEmulation(timing=stage_timing(seconds))))
    return InProcessPipeline(drivers, clock)


def prompt(stream: int, request: int, tokens: Sequence[int], slot: int = 0) -> Batch:
    rows = Rows()
    for i, token in enumerate(tokens):
        rows.append(request, slot + i, slot + i, slot + i - 1 if i else NO_SLOT, i, token)
    alive = list(range(len(rows)))
    return Batch(stream=stream, opened=[Opened(request, Sampling())], rows=rows, wanted=[len(rows) - 1], alive=alive)


def settle(pipeline: InProcessPipeline, clock: VirtualClock) -> list[Result]:
    """Everything that comes out by itself."""
    results = pipeline.poll()
    while (due := pipeline.due) is not None:
        clock.wait(due)
        results += pipeline.poll()
    return results


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_what_comes_out_is_what_the_model_says(stages: int) -> None:
    clock = VirtualClock()
    pipeline = pipeline_of(stages, clock)
    assert pipeline.ready
    pipeline.submit(prompt(0, 0, PROMPT))
    assert not pipeline.ready
    assert pipeline.poll() == []
    assert pipeline.ready, "the first stage took the batch: its buffer is free"
    (result,) = settle(pipeline, clock)
    assert [(pick.node, pick.token) for pick in result.picks] == [(4, plain_next(PROMPT, stages, 50, seed=0))]
    assert clock.now() == pytest.approx(stages)


def test_at_most_two_batches_per_stage_are_under_way() -> None:
    """One computed, one in the buffer; the engine hears of it through ``ready``."""
    clock = VirtualClock()
    pipeline = pipeline_of(2, clock)
    entered = 0
    while pipeline.ready:
        pipeline.submit(prompt(entered, entered, [1, 2], slot=2 * entered))
        entered += 1
        pipeline.poll()
    assert entered == 2
    assert len(settle(pipeline, clock)) == 2


def test_a_cancel_overtakes_batches() -> None:
    clock = VirtualClock()
    pipeline = pipeline_of(3, clock)
    pipeline.submit(prompt(0, 0, PROMPT))
    pipeline.poll()
    pipeline.cancel(Cancel(before=1, nodes=[4]))
    (result,) = settle(pipeline, clock)
    assert result.picks == []
    assert [span.rows for span in result.spans] == [5, 4, 4], "the first stage had begun"


def test_the_first_stages_buffer_must_be_free() -> None:
    pipeline = pipeline_of(1, VirtualClock())
    pipeline.submit(prompt(0, 0, PROMPT))
    with pytest.raises(PenstockError, match="before its buffer was free"):
        pipeline.submit(prompt(1, 1, PROMPT))


def test_stages_beside_the_engine_are_heard_of_as_long_as_it_goes() -> None:
    clock = VirtualClock()
    pipeline = pipeline_of(3, clock)
    clock.wait(7.0)
    assert pipeline.last_heartbeat == [7.0] * 3


def test_close_may_be_called_twice() -> None:
    pipeline = pipeline_of(1, VirtualClock())
    pipeline.close()
    pipeline.close()


# --------------------------------------------------------------------------------------------------- the engine's end


def awaiting(*streams: int) -> EngineEnd:
    end = EngineEnd(VirtualClock(), REAL_LINK)
    for stream in streams:
        end.sending(prompt(stream, stream, PROMPT))
    return end


@pytest.mark.parametrize(
    ("result", "complaint"),
    [
        (Result(stream=1), "result 1 arrived where 0 was due"),
        (Result(stream=0, picks=[SampledToken(3, 5)]), "speaks of nodes"),
        (Result(stream=0, picks=[SampledToken(4, 5), SampledToken(4, 5)]), "speaks of nodes"),
        (Result(stream=0, candidates=[Candidates(99, [1], [0.0])]), "speaks of nodes"),
    ],
)
def test_results_that_answer_no_batch_are_refused(result: Result, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        awaiting(0, 1).received(result, 0.0)


def test_a_result_too_many_is_refused() -> None:
    end = awaiting(0)
    end.received(Result(stream=0, picks=[SampledToken(4, 5)]), 0.0)
    with pytest.raises(ProtocolError, match="result 0 arrived where None was due"):
        end.received(Result(stream=0), 0.0)
    assert [result.stream for result in end.arrived()] == [0]
    assert end.arrived() == []


def test_messages_take_their_time_on_the_entrance() -> None:
    clock = VirtualClock()
    end = EngineEnd(clock, LinkModel(link(2.0)))
    assert end.sending(prompt(0, 0, PROMPT)) > 2.0
    assert not end.ready
    assert end.due is None, "only a message can help"
    end.received(Ready(stage=0), 5.0)
    end.received(Result(stream=0), 3.0)
    assert (end.ready, end.due, end.arrived()) == (False, 3.0, [])
    clock.wait(3.0)
    assert len(end.arrived()) == 1
    assert end.due == 5.0
    clock.wait(5.0)
    assert (end.ready, end.due) == (True, None)


def test_a_buffer_that_is_free_before_the_next_result_is_due_first() -> None:
    clock = VirtualClock()
    end = EngineEnd(clock, LinkModel(link(2.0)))
    end.sending(prompt(0, 0, PROMPT))
    end.received(Ready(stage=0), 3.0)
    end.received(Result(stream=0), 5.0)
    assert end.due == 3.0
    clock.wait(3.0)
    assert (end.ready, end.due) == (True, 5.0)


def test_virtual_time_moves_only_by_waiting() -> None:
    clock = VirtualClock()
    clock.wait(2.5)
    clock.wait(1.0)
    clock.wake()
    assert clock.now() == 2.5
    with pytest.raises(PenstockError, match="nothing is due"):
        clock.wait(None)
