"""One request of an ``AsyncLLM`` as the event loop's thread reads it, while the engine's thread produces it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.core import FinishReason, RequestOutput
from penstock.engine.completion import CompletionDelta
from penstock.engine.job import Job


@dataclass
class RequestDelta:
    """New output of a request since its last delta."""

    deltas: list[CompletionDelta]
    """One for each completion that has something new."""
    finished: bool
    """Whether this is the last one."""


@dataclass
class StreamUpdate:
    """A report of the engine's thread on one stream after a step."""

    deltas: list[CompletionDelta]
    started: bool
    cached: int
    ended: str | None


class RequestStream:
    """A request under way: an async iterator over ``RequestDelta``, for the event loop's thread.

    A slow reader loses nothing: all output since its last read is one delta. Once it has read everything, the iteration
    raises RequestError if the request could not go on, and PipelineError if the engine is lost.
    """

    def __init__(self, request_id: str, job: Job, abort: Callable[[RequestStream], None]) -> None:
        self.request_id = request_id
        self.prompt = job.prompt
        self.prompt_token_ids = job.ids
        self.job = job
        self.started = False
        """Whether the engine has admitted the request; else it waits in the queue."""
        self._abort = abort
        self._outputs = [
            replace(one.output, token_ids=[], logprobs=None if one.output.logprobs is None else [])
            for one in job.completions
        ]
        self._cached = 0
        self._deltas: dict[int, CompletionDelta] = {}
        self._told = False
        self._ended: str | None = None
        self._updates = asyncio.Event()
        self._end = asyncio.Event()

    def abort(self) -> None:
        """End the request within one step of the engine, with a last delta, and free its slots. Safe to call twice."""
        if not self.finished:
            self._abort(self)

    @property
    def finished(self) -> bool:
        """Whether the request has ended, read to the end or not."""
        return all(output.finish_reason is not None for output in self._outputs)

    async def ended(self) -> None:
        """Return when the request has ended, whether or not anybody reads it. Raises as reading does."""
        await self._end.wait()
        self.job.raise_if_failed(self._ended)

    @property
    def numbers(self) -> list[int]:
        """The numbers by which observers know the request, one per completion."""
        return [request.number for request in self.job.requests]

    def output(self) -> RequestOutput:
        """All that has come so far, read or not. The same lists go on growing."""
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, self._outputs, self.finished, self._cached
        )

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestDelta:
        """Wait for new output. The last delta has ``finished`` set, unless an error follows."""
        if self._told and not self._deltas:
            raise StopAsyncIteration
        if not self.finished:
            await self._updates.wait()
        self._updates.clear()
        deltas, self._deltas = list(self._deltas.values()), {}
        if self._failed and not (deltas and any(output.token_ids for output in self._outputs)):
            self.job.raise_if_failed(self._ended)
        self._told = self.finished and not self._failed
        return RequestDelta(deltas, self._told)

    @property
    def _failed(self) -> bool:
        return any(output.finish_reason is FinishReason.ERROR for output in self._outputs)

    def take(self, update: StreamUpdate) -> None:
        """Take in an update of the engine's thread. Runs on the event loop's thread."""
        self.started = self.started or update.started
        self._ended, self._cached = update.ended, update.cached
        for delta in update.deltas:
            before = self._deltas.get(delta.index)
            self._deltas[delta.index] = delta if before is None else before.followed_by(delta)
            output, known = self._outputs[delta.index], self.job.completions[delta.index].output
            delta.add_to(output)
            output.first_token_seconds, output.seconds = known.first_token_seconds, known.seconds
        if update.deltas:
            self._updates.set()
        if self.finished:
            self._end.set()
