"""How a request ends, over an engine whose every word the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from penstock.core import CompletionOutput, FinishReason, PipelineError, RequestError, RequestOutput, SamplingParams
from penstock.engine.async_llm import QueueFull
from penstock.engine.completion import CompletionDelta
from penstock.engine.stream import RequestDelta
from penstock.server.http.errors import ApiError, api_error
from penstock.server.http.gate import Gate
from penstock.server.http.sse import EventStream
from penstock.server.openai.generation import Generation
from penstock.server.openai.prompts import Prompt
from penstock.server.settings import ServerSettings

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

    def say(self, text: str, index: int = 0, end: FinishReason | None = None) -> None:
        self.started = True
        self.news.put_nowait(RequestDelta([CompletionDelta(index, [1], text, None, end)], end is not None))

    def abort(self) -> None:
        self.aborted += 1

    def output(self) -> RequestOutput:
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, [CompletionOutput(0)], False)


class FakeLLM:
    """``full`` are the request ids for which there is no room."""

    def __init__(self, full: tuple[str, ...] = ()) -> None:
        self.streams: list[FakeStream] = []
        self.asked: list[dict[str, Any]] = []
        self._full = full

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
        return Request({"type": "http", "headers": []}, self.receive)


class Bench:
    def __init__(self, llm: FakeLLM | None = None, **timeouts: float) -> None:
        settings = ServerSettings(**{"request_timeout": FOREVER, "queue_timeout": FOREVER, **timeouts})  # type: ignore[arg-type]
        self.llm = llm or FakeLLM()
        self.service: Any = SimpleNamespace(llm=self.llm, settings=settings, gate=Gate())
        self.client = Client()

    def begin(self, prompts: int = 1, n: int = 1) -> Generation:
        return Generation(
            self.service,
            self.client.request,
            [Prompt("a", [1])] * prompts,
            [SamplingParams(n=n)] * prompts,
            request_id="x",
            priority=3,
            client="me",
        )


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
        generation = bench.begin(prompts=2, n=2)
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


def test_all_are_queued_or_none() -> None:
    async def test() -> None:
        bench = Bench(FakeLLM(full=("x-1",)))
        with pytest.raises(QueueFull):
            bench.begin(prompts=2)
        assert bench.llm.streams[0].aborted
        bench.service.gate.draining = True
        with pytest.raises(ApiError, match="shutting down"):
            bench.begin()

    run(test)


def test_a_request_that_is_not_started_in_time() -> None:
    async def test() -> None:
        bench = Bench(queue_timeout=0.01)
        error = await failure(bench.begin())
        assert (error.status_code, error.code) == (503, "queue_timeout")
        assert error.headers == {"Retry-After": "2"}
        assert bench.llm.streams[0].aborted

    run(test)


def test_one_that_has_started_may_take_longer_than_the_queue() -> None:
    async def test() -> None:
        bench = Bench(queue_timeout=0.01)
        generation = bench.begin()
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
        generation = bench.begin()
        bench.llm.streams[0].say("a")
        error = await failure(generation)
        assert (error.status_code, error.code) == (504, "timeout")
        assert error.headers == {"x-should-retry": "false"}
        assert bench.llm.streams[0].aborted

    run(test)


def test_a_client_that_leaves() -> None:
    async def test() -> None:
        bench = Bench()
        generation = bench.begin()
        bench.client.gone.set()
        assert (await failure(generation)).code == "client_gone"
        assert bench.llm.streams[0].aborted

    run(test)


def test_an_engine_that_is_lost() -> None:
    async def test() -> None:
        bench = Bench()
        generation = bench.begin()
        bench.llm.streams[0].news.put_nowait(PipelineError("stage 1 is gone"))
        error = await failure(generation)
        assert (error.status_code, error.code, error.detail) == (503, "engine_lost", "stage 1 is gone")

    run(test)


@pytest.mark.parametrize("hurried", [True, False])
def test_what_is_under_way_when_the_drain_ends(hurried: bool) -> None:
    async def test() -> None:
        bench = Bench()
        gate: Gate = bench.service.gate
        ended = bench.begin()
        generation = bench.begin()
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


def test_a_drain_without_requests_does_not_wait() -> None:
    run(lambda: Gate().drain(FOREVER))


@pytest.mark.parametrize(
    ("error", "status"),
    [(QueueFull("full"), 429), (RequestError("bad"), 400), (PipelineError("lost"), 503), (KeyError("bug"), 500)],
)
def test_errors_and_their_status(error: Exception, status: int) -> None:
    found = api_error(error)
    assert found.status_code == status
    assert ("Retry-After" in (found.headers or {})) is (status == 429), "what is lost does not come back"


# ----------------------------------------------------------------------------------------------------------- streams


class Counted:
    """Events, counted as they are asked for, and whether somebody has cleaned up."""

    def __init__(self) -> None:
        self.asked = 0
        self.cleaned = self.closed = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                self.asked += 1
                yield b"data: {}\n\n"
        finally:
            self.cleaned = True

    def close(self) -> None:
        self.closed = True


async def nothing() -> Any:
    raise AssertionError("the stream itself does not listen")


def test_a_reader_that_does_not_read_is_not_written_for() -> None:
    """The next event is made when the one before it has been taken."""

    async def test() -> None:
        counted, taken = Counted(), asyncio.Semaphore(3)

        async def send(message: Any) -> None:
            await taken.acquire()

        response = EventStream(counted.events(), counted.close)
        sending = asyncio.ensure_future(response({"type": "http"}, nothing, send))
        await asyncio.wait([sending], timeout=0.05)
        assert counted.asked == 3, "the head and two events were taken, the third is on offer"
        sending.cancel()
        await asyncio.wait([sending])
        assert counted.cleaned
        assert counted.closed

    run(test)


def test_a_stream_that_never_begins_is_closed_too() -> None:
    async def test() -> None:
        async def send(message: Any) -> None:
            raise OSError("the connection is gone")

        counted = Counted()
        with pytest.raises(OSError, match="gone"):
            await EventStream(counted.events(), counted.close)({"type": "http"}, nothing, send)
        assert counted.asked == 0
        assert counted.closed

    run(test)
