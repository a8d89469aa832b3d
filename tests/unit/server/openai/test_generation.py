"""How a request ends, over an engine whose every word the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message

from penstock.core import CompletionOutput, FinishReason, PipelineError, QueueFull, RequestOutput, SamplingParams
from penstock.engine.completion import CompletionDelta
from penstock.engine.stream import RequestDelta
from penstock.server.http.errors import ApiError, api_error
from penstock.server.http.middleware import Record
from penstock.server.http.serving import Gate
from penstock.server.openai.generation import Call, Generation, Service, Summary
from penstock.server.openai.params import Prompt, RequestParams
from penstock.server.openai.protocol import CompletionRequest
from penstock.server.openai.reply import Choice, CompletionWriter, reply_of
from penstock.server.settings import ServerSettings
from tests.unit.text.conftest import byte_level

FOREVER = 1000.0


class FakeStream:
    """A stream of what the test puts into it."""

    def __init__(self, request_id: str, prompt: dict[str, Any]) -> None:
        self.request_id = request_id
        self.prompt, self.prompt_token_ids = prompt["prompt"], prompt["prompt_token_ids"]
        self.started = False
        self.aborted = 0
        self.news: asyncio.Queue[RequestDelta | Exception] = asyncio.Queue()

    async def __anext__(self) -> RequestDelta:
        news = await self.news.get()
        if isinstance(news, Exception):
            raise news
        return news

    def say(
        self, text: str, index: int = 0, end: FinishReason | None = None, *, token: int = 1, last: bool = True
    ) -> None:
        """Send a delta with ``end`` as the choice's reason; the request ends with it unless ``last`` says otherwise."""
        self.started = True
        delta = CompletionDelta(index, [token], text, None, end)
        self.news.put_nowait(RequestDelta([delta], last and end is not None))

    def abort(self) -> None:
        self.aborted += 1

    def output(self) -> RequestOutput:
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, [CompletionOutput(0)], False)


class FakeLLM:
    """``full`` are the request ids for which there is no room."""

    def __init__(self, full: tuple[str, ...] = ()) -> None:
        self.streams: list[FakeStream] = []
        self.asked: list[dict[str, Any]] = []
        self.setup = SimpleNamespace(max_model_len=100, kv_slots=100)
        self._full = full

    def get_tokenizer(self) -> None:
        """No text is encoded here."""

    async def prepare(self, params: SamplingParams) -> None:
        """There is no grammar."""

    def submit(self, prompt: dict[str, Any], params: SamplingParams, **asked: Any) -> FakeStream:
        if asked["request_id"] in self._full:
            raise QueueFull("full")
        self.asked.append(asked)
        self.streams.append(FakeStream(asked["request_id"], prompt))
        return self.streams[-1]


class Client:
    """The other end of the connection: ``gone`` is set when it leaves."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def request(self) -> Request:
        record = Record("x", "POST", "/v1/completions", "me")
        return Request({"type": "http", "headers": [], "state": {"record": record}}, self.receive)


class Bench:
    def __init__(self, llm: FakeLLM | None = None, **timeouts: float) -> None:
        settings = ServerSettings(**{"request_timeout": FOREVER, "queue_timeout": FOREVER, **timeouts})  # type: ignore[arg-type]
        self.llm = llm or FakeLLM()
        self.gate = Gate()
        self.ended: list[Summary] = []
        self.service = Service(self.llm, settings, self.gate, self.ended.append)  # type: ignore[arg-type]
        self.client = Client()

    async def begin(self, prompts: int = 1, n: int = 1) -> Generation:
        body = CompletionRequest(prompt="a", priority=3)
        params = RequestParams(SamplingParams(n=n))
        call = Call(self.client.request, body, [Prompt("a", [1])] * prompts, [params] * prompts, {})
        return await self.service.generate(call)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


async def texts(generation: Generation) -> list[tuple[int, str]]:
    return [(delta.index, delta.text) async for delta in generation.deltas()]


async def failure(generation: Generation) -> ApiError:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        await texts(generation)
    generation.close()
    return api_error(caught.value)


def test_choices_of_all_prompts_are_numbered_and_come_as_they_are_ready() -> None:
    async def test() -> None:
        bench = Bench()
        generation = await bench.begin(prompts=2, n=2)
        first, second = bench.llm.streams
        assert [asked["request_id"] for asked in bench.llm.asked] == ["x-0", "x-1"]
        assert {asked["priority"] for asked in bench.llm.asked} == {3}
        deltas = generation.deltas()
        second.say("c", index=1)
        assert (await anext(deltas)).index == 3, "it does not wait for the first prompt"
        first.say("a", end=FinishReason.STOP)
        second.say("d", end=FinishReason.STOP)
        rest = {(delta.index, delta.text) async for delta in deltas}
        assert rest == {(0, "a"), (2, "d")}

    run(test)


def test_its_end_is_told_once() -> None:
    async def test() -> None:
        bench = Bench()
        generation = await bench.begin(prompts=2)
        for stream in bench.llm.streams:
            stream.say("a", end=FinishReason.STOP)
        await texts(generation)
        assert not bench.ended
        generation.close()
        generation.close()
        (summary,) = bench.ended
        assert summary.prompt_tokens == 2
        assert 0 < (summary.first_token_seconds or 0) <= (summary.last_token_seconds or 0)

    run(test)


def test_all_are_queued_or_none() -> None:
    async def test() -> None:
        bench = Bench(FakeLLM(full=("x-1",)))
        with pytest.raises(QueueFull):
            await bench.begin(prompts=2)
        assert bench.llm.streams[0].aborted
        bench.gate.draining = True
        with pytest.raises(ApiError, match="shutting down"):
            await bench.begin()

    run(test)


def test_a_request_that_is_not_started_in_time() -> None:
    async def test() -> None:
        bench = Bench(queue_timeout=0.01)
        error = await failure(await bench.begin())
        assert (error.status_code, error.code) == (503, "queue_timeout")
        assert error.headers == {"Retry-After": "2"}
        assert bench.llm.streams[0].aborted

    run(test)


def test_one_that_has_started_may_take_longer_than_the_queue() -> None:
    async def test() -> None:
        bench = Bench(queue_timeout=0.01)
        generation = await bench.begin()
        bench.llm.streams[0].started = True
        reading = asyncio.ensure_future(texts(generation))
        done, _ = await asyncio.wait([reading], timeout=0.05)
        assert not done
        bench.llm.streams[0].say("a", end=FinishReason.STOP)
        assert await reading == [(0, "a")]

    run(test)


def test_a_request_that_takes_too_long() -> None:
    async def test() -> None:
        bench = Bench(request_timeout=0.01)
        generation = await bench.begin()
        bench.llm.streams[0].say("a")
        error = await failure(generation)
        assert (error.status_code, error.code) == (504, "timeout")
        assert error.headers == {"x-should-retry": "false"}
        assert bench.llm.streams[0].aborted

    run(test)


def test_a_client_that_leaves() -> None:
    async def test() -> None:
        bench = Bench()
        generation = await bench.begin()
        bench.client.gone.set()
        assert (await failure(generation)).code == "client_gone"
        assert bench.llm.streams[0].aborted

    run(test)


def test_an_engine_that_is_lost() -> None:
    async def test() -> None:
        bench = Bench()
        generation = await bench.begin()
        bench.llm.streams[0].news.put_nowait(PipelineError("stage 1 is gone"))
        error = await failure(generation)
        assert (error.status_code, error.code, error.detail) == (503, "engine_lost", "stage 1 is gone")

    run(test)


@pytest.mark.parametrize("hurried", [True, False])
def test_what_is_under_way_when_the_drain_ends(hurried: bool) -> None:
    async def test() -> None:
        bench = Bench()
        gate = bench.gate
        ended = await bench.begin()
        generation = await bench.begin()
        reading = asyncio.ensure_future(failure(generation))
        draining = asyncio.ensure_future(gate.drain(FOREVER if hurried else 0.02))
        ended.close()
        await asyncio.sleep(0)
        assert not reading.done()
        if hurried:
            gate.hurry()
        assert (await reading).code == "shutting_down"
        await draining

    run(test)


def test_a_reply_in_one_piece_has_what_there_was_when_the_time_was_up() -> None:
    """A client that waited for all of it gets what the server has computed, and is told."""

    async def test() -> None:
        bench = Bench(request_timeout=0.05)
        generation = await bench.begin()
        bench.llm.streams[0].say("a")
        reply = await replied(bench, generation)
        assert reply["choices"][0]["finish_reason"] == "length"
        assert "not done within 0.05 s (--request-timeout)" in reply["warning"]
        assert bench.llm.streams[0].aborted

    run(test)


def test_a_reply_that_is_whole_has_no_warning() -> None:
    async def test() -> None:
        bench = Bench()
        generation = await bench.begin()
        bench.llm.streams[0].say("a", end=FinishReason.STOP)
        assert "warning" not in await replied(bench, generation)

    run(test)


def test_a_request_without_a_token_in_time_is_an_error() -> None:
    async def test() -> None:
        bench = Bench(request_timeout=0.01)
        generation = await bench.begin()
        with pytest.raises(ApiError) as caught:
            await replied(bench, generation)
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")

    run(test)


def test_an_empty_answer_says_why() -> None:
    async def test() -> None:
        bench = Bench()
        generation = await bench.begin()
        (stream,) = bench.llm.streams
        ended = CompletionOutput(0, [byte_level().eos_token_ids[0]], "", FinishReason.STOP)
        stream.output = lambda: RequestOutput("x", "a", [1], [ended], True)  # type: ignore[method-assign]
        stream.say("", end=FinishReason.STOP)
        reply = await replied(bench, generation)
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["warning"].startswith(WHY_EMPTY)

    run(test)


def test_the_end_of_a_stream_without_text_says_why() -> None:
    async def test() -> None:
        bench = Bench()
        generation = await bench.begin(n=2)
        (stream,) = bench.llm.streams
        stream.say("", index=0, token=byte_level().eos_token_ids[0], end=FinishReason.STOP, last=False)
        stream.say("a", index=1)
        stream.say("", index=1, token=byte_level().eos_token_ids[0], end=FinishReason.STOP)
        empty, begun, ended = await streamed(bench, generation, n=2)
        assert empty["choices"][0]["finish_reason"] == "stop"
        assert empty["warning"].startswith(WHY_EMPTY)
        assert "warning" not in begun
        assert "warning" not in ended

    run(test)


WHY_EMPTY = "the answer is empty: the model's first token was an end token ('</s>')"


async def replied(bench: Bench, generation: Generation) -> dict[str, Any]:
    reply = await answered(bench, generation, CompletionRequest(prompt="a"), n=1)
    found: dict[str, Any] = json.loads(bytes(reply.body))
    return found


async def streamed(bench: Bench, generation: Generation, n: int) -> list[dict[str, Any]]:
    """The events but ``[DONE]``."""
    reply = await answered(bench, generation, CompletionRequest(prompt="a", stream=True), n)
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    await reply({"type": "http"}, bench.client.receive, send)
    *chunks, done, rest = b"".join(sent).decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


async def answered(bench: Bench, generation: Generation, body: CompletionRequest, n: int) -> Response:
    writer = CompletionWriter(body, [Prompt("a", [1])], n, "x", "m", str)
    choices = [Choice(str) for _ in range(n)]
    generation.call = replace(generation.call, body=body)
    return await reply_of(generation, choices, writer, byte_level())
