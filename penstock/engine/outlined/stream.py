"""An answer in points as the event loop's thread reads it: shaped like a request's stream, and made of several."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from penstock.core import CompletionOutput, FinishReason, OutlineOutput, RequestOutput
from penstock.engine.completion import CompletionDelta
from penstock.engine.outlined.joined import Joined, timed
from penstock.engine.stream import RequestDelta, RequestStream
from penstock.outlines.asks import Ask, Step, Steps

Begin = Callable[[Ask], RequestStream]
"""Queues one of the answer's requests."""
Aside = Callable[[Callable[[], Step]], Awaitable[Step]]
"""Prepares the next step beside the event loop, since writing its prompts takes a while."""


class OutlineStream:
    """An answer under way: an async iterator over ``RequestDelta`` with a single completion.

    A step begins once the one before has ended and somebody reads. Raises as a ``RequestStream`` does.
    """

    def __init__(
        self, request_id: str, prompt: Mapping[str, Any], steps: Steps, first: Step, begin: Begin, aside: Aside
    ) -> None:
        """``first`` is the first of ``steps``; its requests are queued at once, and may be refused."""
        self.request_id = request_id
        self.prompt: str = prompt["prompt"]
        self.prompt_token_ids: list[int] = prompt["prompt_token_ids"]
        self._steps = steps
        self._begin = begin
        self._aside = aside
        self._output = CompletionOutput(0)
        self._parts: list[RequestStream] = []
        self._past: list[RequestStream] = []
        self._reads: dict[RequestStream, asyncio.Future[RequestDelta]] = {}
        self._aborted = False
        self._enter(first)

    @property
    def report(self) -> OutlineOutput:
        """The report on how the answer comes about, as far as that is known."""
        return self._step.report

    @property
    def started(self) -> bool:
        """Whether the engine has admitted any of the answer's requests."""
        return bool(self._past) or any(part.started for part in self._parts)

    @property
    def finished(self) -> bool:
        return self._output.finish_reason is not None

    @property
    def numbers(self) -> list[int]:
        """The numbers by which observers know the requests of the current step."""
        return [number for part in self._parts for number in part.numbers]

    def abort(self) -> None:
        """End the answer's requests and begin no further step. Safe to call twice."""
        self._aborted = True
        for part in self._parts:
            part.abort()

    def output(self) -> RequestOutput:
        """All that has come so far, read or not."""
        parts = [part.output() for part in self._parts]
        if self._step.last:
            timed(self._output, self.report, parts)
            self.report.points = parts if self.report.used else []
        cached = parts[0].num_cached_tokens
        ids, outputs = self.prompt_token_ids, [self._output]
        return RequestOutput(self.request_id, self.prompt, ids, outputs, self.finished, cached, self.report)

    def __aiter__(self) -> OutlineStream:
        return self

    async def __anext__(self) -> RequestDelta:
        """Wait for new output of any point. The last delta has ``finished`` set."""
        if self.finished:
            raise StopAsyncIteration
        try:
            while not self._step.last:
                await asyncio.gather(*(read_all(part) for part in self._parts))
                if self._aborted:
                    return self._ended_by_abort()
                said = [part.output() for part in self._parts]
                self._enter(await self._aside(partial(self._steps.send, said)))
            return await self._news()
        except BaseException:
            self._leave()
            raise

    # ---------------------------------------------------------------------------------------------------- inside

    def _enter(self, step: Step) -> None:
        """Queue all requests of a step, or none if one is refused."""
        self._step = step
        self._past += self._parts
        self._parts = []
        try:
            for ask in step.asks:
                self._parts.append(self._begin(ask))
        except BaseException:
            self.abort()
            raise
        if self._aborted:
            self.abort()
        if step.last:
            self._joined = Joined(step.headings)
            self._reads = {part: asyncio.ensure_future(anext(part)) for part in self._parts}

    async def _news(self) -> RequestDelta:
        """Wait for new output of any point. The delta holds what it adds to the whole, and each point's own text."""
        await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
        points: list[tuple[int, str]] = []
        for number, part in enumerate(self._parts):
            if part not in self._reads or not self._reads[part].done():
                continue
            news = self._reads.pop(part).result()
            if not news.finished:
                self._reads[part] = asyncio.ensure_future(anext(part))
            for delta in news.deltas:
                self._joined.push(number, delta)
                points.append((number, delta.text))
        whole = self._joined.take() or CompletionDelta(0, [], "")
        whole.points = tuple(points) if self.report.used else ()
        whole.add_to(self._output)
        if self.finished:
            self._leave()  # points behind a stop string may still run, and nobody waits for them
        return RequestDelta([whole], self.finished)

    def _leave(self) -> None:
        self.abort()
        for read in self._reads.values():
            read.cancel()

    def _ended_by_abort(self) -> RequestDelta:
        ended = CompletionDelta(0, [], "", None, FinishReason.ABORT)
        ended.add_to(self._output)
        return RequestDelta([ended], True)


async def read_all(stream: RequestStream) -> None:
    async for _ in stream:
        pass
