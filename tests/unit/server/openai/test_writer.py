"""The events of a response add up to the response itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from penstock.core import CompletionOutput, RequestOutput
from penstock.server.http.errors import timed_out
from penstock.server.openai.generation import summarize
from penstock.server.openai.protocol import FinishWord
from penstock.server.openai.reply import ChoiceDelta
from penstock.server.openai.responses import Event, ResponsesRequest
from penstock.server.openai.responses_writer import ResponseWriter
from penstock.server.openai.tools import ToolCallDelta

SUMMARY = summarize([RequestOutput("x", "p", [1], [CompletionOutput(0, [1, 2])], True)], 0.5, 1.0)


def writer() -> ResponseWriter:
    return ResponseWriter(ResponsesRequest(input="a", metadata={"k": "v"}), "7", "demo")


def delta(
    text: str = "", calls: tuple[ToolCallDelta, ...] = (), end: FinishWord | None = None, *, first: bool = False
) -> ChoiceDelta:
    return ChoiceDelta(0, first, text, list(calls), [], None, 0, end, None)


DELTAS = [
    delta("It is ", first=True),
    delta("noon."),
    delta(calls=(ToolCallDelta(0, "call_1", "clock", ""),)),
    delta(calls=(ToolCallDelta(0, "", "", "{}"),)),
    delta(calls=(ToolCallDelta(1, "call_2", "clock", '{"zone": 1}'),), end="tool_calls"),
]
TOGETHER = delta(
    "It is noon.",
    (ToolCallDelta(0, "call_1", "clock", "{}"), ToolCallDelta(1, "call_2", "clock", '{"zone": 1}')),
    "tool_calls",
    first=True,
)


def streamed(deltas: list[ChoiceDelta]) -> list[Event]:
    one = writer()
    return [*(event for each in deltas for event in one.chunks(each)), *one.last_chunks(SUMMARY)]


def test_a_stream_ends_with_what_would_have_come_in_one_piece() -> None:
    events = streamed(DELTAS)
    whole = writer().whole([TOGETHER], SUMMARY)
    assert events[-1].type == "response.completed"
    assert events[-1].response == whole.model_copy(update={"created_at": events[-1].response.created_at})
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert whole.metadata == {"k": "v"}
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (1, 2, 3)


def test_events_come_in_openais_order() -> None:
    events = streamed(DELTAS)
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert all(later.sequence_number == earlier.sequence_number + 1 for earlier, later in pairwise(events))
    assert [event.text for event in events if event.type.endswith("output_text.done")] == ["It is noon."]
    added = next(event for event in events if event.type == "response.content_part.added")
    assert added.part is not None
    assert added.part.text == ""


def test_a_response_that_was_cut_off_is_incomplete() -> None:
    events = streamed([delta("It", first=True), delta(end="length")])
    response = events[-1].response
    assert response is not None
    assert (events[-1].type, response.status) == ("response.incomplete", "incomplete")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_an_answer_without_a_word_is_an_empty_message() -> None:
    (item,) = writer().whole([delta(end="stop", first=True)], SUMMARY).output
    assert item.type == "message"
    assert [part.text for part in item.content] == [""]


def test_the_last_event_says_why_an_answer_is_empty() -> None:
    *before, last = streamed([replace(delta(end="stop", first=True), warning="it ended at once")])
    assert last.response is not None
    assert last.response.warning == "it ended at once"
    assert not any(event.response.warning for event in before if event.response is not None)


def test_a_failure_is_the_last_event() -> None:
    one = writer()
    assert len(list(one.chunks(delta("It", first=True)))) == 5
    failed = one.failure(timed_out(3))
    assert (failed.type, failed.sequence_number) == ("response.failed", 5)
    assert failed.response is not None
    assert failed.response.error is not None
    assert failed.response.error.code == "timeout"
