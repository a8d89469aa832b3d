"""The generation of one HTTP request: from the engine's queue to the last token, however it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request

from penstock.core import FinishReason, OutlineOutput, RequestOutput
from penstock.engine.completion import CompletionDelta
from penstock.engine.outlined.stream import OutlineStream
from penstock.engine.stream import RequestDelta, RequestStream
from penstock.server.http.errors import ApiError, busy, client_closed, timed_out
from penstock.server.http.gate import Gate
from penstock.server.openai.usage import Summary, summarize
from penstock.server.settings import ServerSettings


class Generation:
    """One request in the engine per prompt, with ``n`` choices each; choice ``n * prompt + i`` is a prompt's i-th.

    It ends with its last token, or early: when the client leaves, when it takes too long, when the server stops.
    ``deltas`` raises the reason. ``close`` frees what is left, and must be called.
    """

    def __init__(
        self,
        request: Request,
        streams: Sequence[RequestStream | OutlineStream],
        n: int,
        settings: ServerSettings,
        gate: Gate,
        began: float,
        on_close: Callable[[Generation], None],
    ) -> None:
        """``request``'s body was read at ``began`` (seconds, ``time.monotonic``). ``on_close`` is called once."""
        self.n = n
        self._streams = streams
        self._settings = settings
        self._gate = gate
        self._on_close = on_close
        self._began = began
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._reads: dict[asyncio.Future[RequestDelta], int] = {}
        """The pending reads, each with the number of its stream."""
        self._failed: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._closed = False
        self._watch = asyncio.ensure_future(self._watch_client(request))
        gate.enter(self)

    @property
    def choices(self) -> int:
        """The number of choices of all prompts together."""
        return self.n * len(self._streams)

    async def deltas(self) -> AsyncIterator[CompletionDelta]:
        """The new parts of any choice, as they come. Raises ApiError or PipelineError where it ends early."""
        for number in range(len(self._streams)):
            self._read(number)
        while self._reads:
            for read in await self._some():
                number, news = self._reads.pop(read), read.result()
                if not news.finished:
                    self._read(number)
                self._note_time()
                for delta in news.deltas:
                    yield replace(delta, index=number * self.n + delta.index)

    def whole(self) -> list[CompletionDelta]:
        """All choices so far, each as one delta. A choice that has not ended counts as cut off by length."""
        return [
            CompletionDelta(
                number * self.n + choice.index,
                choice.token_ids,
                choice.text,
                choice.logprobs,
                choice.finish_reason or FinishReason.LENGTH,
                choice.stop_reason,
            )
            for number, output in enumerate(self.outputs())
            for choice in output.outputs
        ]

    @property
    def outline(self) -> OutlineOutput | None:
        """The report on how the answer comes about, for an answer in points; else None."""
        return self._streams[0].report if isinstance(self._streams[0], OutlineStream) else None

    def outputs(self) -> list[RequestOutput]:
        """The outputs so far, one per prompt."""
        return [stream.output() for stream in self._streams]

    def summary(self) -> Summary:
        """The token counts and timings so far."""
        moments = [None if at is None else at - self._began for at in (self._first_token_at, self._last_token_at)]
        return summarize(self.outputs(), *moments)

    def fail(self, error: ApiError) -> None:
        """End the generation early. Only the first error counts."""
        if not self._failed.done():
            self._failed.set_result(error)

    def close(self) -> None:
        """Abort whatever still runs. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            stream.abort()
        self._watch.cancel()
        for read in self._reads:
            read.cancel()
        self._gate.leave(self)
        self._on_close(self)

    # ---------------------------------------------------------------------------------------------------- inside

    def _read(self, number: int) -> None:
        self._reads[asyncio.ensure_future(self._streams[number].__anext__())] = number

    async def _some(self) -> list[asyncio.Future[RequestDelta]]:
        """Wait until at least one read is done, for as long as the timeouts allow."""
        while True:
            waits: set[asyncio.Future[Any]] = {*self._reads, self._failed}
            await asyncio.wait(waits, timeout=self._left(), return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise self._failed.result()
            if done := [read for read in self._reads if read.done()]:
                return done
            self._raise_if_late()

    def _left(self) -> float:
        seconds = self._settings.request_timeout
        if not self._started and self._waited < self._settings.queue_timeout:
            seconds = min(seconds, self._settings.queue_timeout)
        return max(seconds - self._waited, 0.0)

    def _raise_if_late(self) -> None:
        if self._waited >= self._settings.request_timeout:
            raise timed_out(self._settings.request_timeout)
        if not self._started and self._waited >= self._settings.queue_timeout:
            message = f"the request has waited {self._settings.queue_timeout:g} s for its turn (--queue-timeout)"
            raise busy(message, "queue_timeout")

    @property
    def _started(self) -> bool:
        return all(stream.started for stream in self._streams)

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._began

    def _note_time(self) -> None:
        self._last_token_at = time.monotonic()
        if self._first_token_at is None:
            self._first_token_at = self._last_token_at

    async def _watch_client(self, request: Request) -> None:
        """Fail the generation when the client leaves, the only message that can still come from it."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.fail(client_closed())
