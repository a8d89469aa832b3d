"""The engine's end that all pipelines share."""

from __future__ import annotations

import pytest

from penstock.emulation.device import LinkModel
from penstock.messages import Cancel, Candidates, DeviceReserved, Message, Ready, Result, SampledToken
from penstock.pipeline.base import VirtualClock
from penstock.pipeline.engine_end import EngineEnd
from penstock.stage.driver import REAL_LINK
from penstock.stage.visibility import ProtocolError
from tests.unit.pipeline.test_inprocess import PROMPT, prompt
from tests.unit.stage.test_driver import link


def awaiting(*streams: int) -> EngineEnd:
    """In a model of 50 tokens."""
    end = EngineEnd(VirtualClock(), REAL_LINK, 50)
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
        (Result(stream=0, picks=[SampledToken(4, 50)]), "result 0 names token 50; the model's are 0 to 49"),
        (Result(stream=0, picks=[SampledToken(4, 5, top=[(49, 0.0), (51, 0.0)])]), "names token 51"),
        (Result(stream=0, candidates=[Candidates(4, [3, 77, 4], [0.0] * 3)]), "names token 77"),
        (Result(stream=0), r"result 0 does not speak of nodes \[4\]"),
        (Result(stream=0, candidates=[Candidates(4, [3], [0.0])]), "answers another question"),
        (Result(stream=0, candidates=[Candidates(4, [3], [0.0], 1)]), "answers level 1 of node 4 out of turn"),
        (Result(stream=0, candidates=[Candidates(4, [3], [0.0], n) for n in (0, 1)]), "level 1 of node 4 out of turn"),
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


def test_cancelled_nodes_may_stay_unanswered_and_are_forgotten_with_their_batch() -> None:
    end = awaiting(0, 1)
    end.sending(Cancel(before=1, nodes=[4]))
    end.received(Result(stream=0), 0.0)
    with pytest.raises(ProtocolError, match="does not speak of nodes"):
        end.received(Result(stream=1), 0.0)


def test_no_stage_but_the_first_has_a_buffer_of_the_engines() -> None:
    end = awaiting(0)
    assert not end.received(Ready(stage=1), 0.0)
    assert not end.ready


def test_messages_take_their_time_on_the_entrance() -> None:
    clock = VirtualClock()
    end = EngineEnd(clock, LinkModel(link(2.0)))
    assert end.sending(prompt(0, 0, PROMPT)) > 2.0
    assert not end.ready
    assert end.due is None, "only a message can help"
    end.received(Ready(stage=0), 5.0)
    end.received(Result(stream=0, picks=[SampledToken(4, 5)]), 3.0)
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
    end.received(Result(stream=0, picks=[SampledToken(4, 5)]), 5.0)
    assert end.due == 3.0
    clock.wait(3.0)
    assert (end.ready, end.due) == (True, 5.0)


def test_what_is_not_of_the_stream_is_offered_to_who_listens() -> None:
    end, told = awaiting(0), DeviceReserved(stage=0, start=1.0, end=2.0)
    assert not end.received(told, 0.0)
    heard: list[Message] = []

    def listener(message: Message) -> bool:
        heard.append(message)
        return isinstance(message, DeviceReserved)

    end.listener = listener
    assert end.received(Ready(stage=0), 0.0)
    assert end.received(told, 0.0)
    assert not end.received(prompt(0, 0, PROMPT), 0.0), "a batch is for no engine"
    assert [type(message).__name__ for message in heard] == ["DeviceReserved", "Batch"]
