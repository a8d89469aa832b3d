"""The in-process pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.core import PenstockError
from penstock.emulation.stage import StageEmulation, emulated_driver
from penstock.messages import NO_SLOT, Batch, Cancel, Opened, Result, Rows, Sampling
from penstock.pipeline.base import VirtualClock
from penstock.pipeline.engine_end import InProcessPipeline
from penstock.stage.driver import StageCore
from tests.hash_model import HashLayers, plain_next
from tests.unit.stage.test_driver import stage_timing

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
    """Let the pipeline run until nothing more comes out by itself."""
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


def test_virtual_time_moves_only_by_waiting() -> None:
    clock = VirtualClock()
    clock.wait(2.5)
    clock.wait(1.0)
    clock.wake()
    assert clock.now() == 2.5
    with pytest.raises(PenstockError, match="nothing is due"):
        clock.wait(None)
