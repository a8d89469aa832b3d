"""What one HTTP request has the engine do, from its queue to the last token, however it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import Request

from penstock.core import RequestOutput, SamplingParams
from penstock.engine.completion import CompletionDelta
from penstock.server.http.errors import ApiError, busy, timed_out
from penstock.server.openai.prompts import Prompt

if TYPE_CHECKING:
    from penstock.engine.stream import RequestDelta, RequestStream
    from penstock.server.openai.service import Service


def gone() -> ApiError:
    """The client has left. Nobody reads this; the log shows it, under the number that nginx gave it."""
    return ApiError(499, "the client has closed the connection", code="client_gone")


class Generation:
    """One request in the engine per prompt, with ``n`` choices each; choice ``n * prompt + i`` is a prompt's i-th.

    It ends with its last token, or early: when the client leaves, when it takes too long, when the server stops. All of
    that comes out of ``deltas``. ``close`` frees whatever is left, and has to be called.
    """

    def __init__(
        self,
        service: Service,
        request: Request,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        request_id: str,
        priority: int,
        client: str,
    ) -> None:
        """Queue all, or none if one is refused. Raises as ``AsyncLLM.submit`` does, and ApiError once draining."""
        service.gate.check_open()
        self._service = service
        self.request_id = request_id
        self.began = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.on_close: Callable[[], None] | None = None
        self.streams: list[RequestStream] = []
        self._n = params[0].n
        self._reads: dict[asyncio.Future[RequestDelta], int] = {}
        """Which of the streams each read is of."""
        self._failed: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._closed = False
        try:
            for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                name = request_id if len(prompts) == 1 else f"{request_id}-{number}"
                self.streams.append(
                    service.llm.submit(
                        {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids},
                        one,
                        request_id=name,
                        priority=priority,
                        client=client,
                    )
                )
        except BaseException:
            self._abort()
            raise
        self._watch = asyncio.ensure_future(self._watch_client(request))
        service.gate.enter(self)

    async def deltas(self) -> AsyncIterator[CompletionDelta]:
        """What is new of any choice, as it comes. Raises ApiError or PipelineError where it ends early."""
        for number in range(len(self.streams)):
            self._read(number)
        while self._reads:
            for read in await self._some():
                number, news = self._reads.pop(read), read.result()
                if not news.finished:
                    self._read(number)
                self._note_time()
                for delta in news.deltas:
                    yield replace(delta, index=number * self._n + delta.index)

    def fail(self, error: ApiError) -> None:
        """End it early. Only the first reason counts."""
        if not self._failed.done():
            self._failed.set_result(error)

    def outputs(self) -> list[RequestOutput]:
        """All so far, per prompt."""
        return [stream.output() for stream in self.streams]

    def close(self) -> None:
        """Abort what still runs. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._abort()
        self._watch.cancel()
        for read in self._reads:
            read.cancel()
        self._service.gate.leave(self)
        if self.on_close is not None:
            self.on_close()

    def _abort(self) -> None:
        for stream in self.streams:
            stream.abort()

    def _read(self, number: int) -> None:
        self._reads[asyncio.ensure_future(self.streams[number].__anext__())] = number

    async def _some(self) -> list[asyncio.Future[RequestDelta]]:
        """Wait until a read has something, no longer than there is time."""
        while True:
            waits: set[asyncio.Future[Any]] = {*self._reads, self._failed}
            await asyncio.wait(waits, timeout=self._left(), return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise self._failed.result()
            if done := [read for read in self._reads if read.done()]:
                return done
            self._raise_if_late()

    def _left(self) -> float:
        settings = self._service.settings
        seconds = settings.request_timeout
        if not self._started and self._waited < settings.queue_timeout:
            seconds = min(seconds, settings.queue_timeout)
        return max(seconds - self._waited, 0.0)

    def _raise_if_late(self) -> None:
        settings = self._service.settings
        if self._waited >= settings.request_timeout:
            raise timed_out(settings.request_timeout)
        if not self._started and self._waited >= settings.queue_timeout:
            message = f"the request has waited {settings.queue_timeout:g} s for its turn (--queue-timeout)"
            raise busy(message, "queue_timeout")

    @property
    def _started(self) -> bool:
        return all(stream.started for stream in self.streams)

    @property
    def _waited(self) -> float:
        return time.monotonic() - self.began

    def _note_time(self) -> None:
        self.last_token_at = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = self.last_token_at

    async def _watch_client(self, request: Request) -> None:
        """The body has been read: all that can come now is that the client leaves."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.fail(gone())
