"""Server-sent events to chunks: however the bytes are cut, and whatever a server may send."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from httpx_sse import EventSource

from penstock.clients.api import AnswerStream, Chunk, ServerError, Usage, read_chunk

EVENTS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "é\u2028\u0085x"}, "finish_reason": None}], "usage": None},
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
]
CHUNKS = [Chunk(), Chunk("é\u2028\u0085x"), Chunk(finish_reason="stop"), Chunk(usage=Usage(3, 2))]


def stream(line_end: str) -> bytes:
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}{line_end}{line_end}" for event in EVENTS]
    return "".join([f": ping{line_end}", *lines, f"data: [DONE]{line_end}{line_end}"]).encode()


def chunks(answer: AnswerStream, data: bytes, size: int = 10_000) -> list[Chunk]:
    """Feed an answer a response's bytes, ``size`` at a time, and return its chunks."""
    pieces = (data[start : start + size] for start in range(0, len(data), size))
    response = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=pieces)
    return [chunk for event in EventSource(response).iter_sse() for chunk in answer.take(event)]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_however_the_bytes_are_cut(line_end: str, size: int) -> None:
    answer = AnswerStream()
    assert chunks(answer, stream(line_end), size) == CHUNKS
    answer.close()


def test_a_completion_has_its_text_elsewhere() -> None:
    payload = '{"choices": [{"index": 0, "text": "ab", "finish_reason": "length"}]}'
    assert read_chunk(payload) == Chunk("ab", "length")


def test_thoughts_are_text() -> None:
    assert read_chunk('{"choices": [{"delta": {"content": null, "reasoning_content": "hm"}}]}') == Chunk("hm")


def test_usage_says_what_was_cached_and_drafted() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
    usage["completion_tokens_details"] = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
    assert read_chunk(json.dumps({"choices": [], "usage": usage})).usage == Usage(9, 4, 8, 3, 1)


@pytest.mark.parametrize("usage", [{}, {"completion_tokens": 4}])
def test_half_a_usage_is_none(usage: dict[str, int]) -> None:
    assert read_chunk(json.dumps({"choices": [], "usage": usage})) == Chunk()


@pytest.mark.parametrize(
    ("payload", "kind", "words"),
    [
        (b'{"error": {"message": "stage 1 was lost", "code": 503}}', "error event", "stage 1 was lost"),
        (b'{"object": "error", "message": "too long"}', "error event", "too long"),
        (b"{", "bad stream", "not JSON"),
        (b"[]", "bad stream", "no object"),
        (b'{"choices": {"a": 1}}', "bad stream", "no chunk"),
        (b'{"choices": [1]}', "bad stream", "no chunk"),
        (b'{"choices": [{"text": 1}]}', "bad stream", "no chunk"),
        (b'{"choices": [], "usage": 1}', "bad stream", "no chunk"),
    ],
)
def test_what_is_no_chunk(payload: bytes, kind: str, words: str) -> None:
    with pytest.raises(ServerError, match=words) as caught:
        chunks(AnswerStream(), b"data: " + payload + b"\n\n")
    assert caught.value.kind == kind


def test_an_answer_that_was_not_finished() -> None:
    answer = AnswerStream()
    chunks(answer, stream("\n").split(b'data: {"choices": [{"delta": {}, "fin')[0])
    with pytest.raises(ServerError, match="before the answer was finished"):
        answer.close()


def test_a_finish_reason_ends_an_answer_where_a_server_sends_no_done() -> None:
    answer = AnswerStream()
    chunks(answer, stream("\n").replace(b"data: [DONE]\n\n", b""))
    answer.close()
