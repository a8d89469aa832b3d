"""The way from a generation to the response: streamed or whole, and an error where it fails."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Protocol

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from penstock.engine.completion import CompletionDelta
from penstock.server.http.errors import api_error
from penstock.server.http.records import record_of
from penstock.server.http.sse import DONE, EventStream, event
from penstock.server.openai.generation import Generation
from penstock.server.openai.protocol import GenerationFields

log = logging.getLogger(__name__)


class Writer(Protocol):
    def whole(self) -> BaseModel: ...

    def chunks(self, delta: CompletionDelta) -> Iterator[BaseModel]: ...

    def last_chunk(self) -> BaseModel: ...


async def reply_of(request: Request, generation: Generation, writer: Writer, body: GenerationFields) -> Response:
    """Wait for the first token, so that what fails before it has a status of its own; then stream or collect.

    Closes the generation: here, or when the stream has been sent. Raises as ``Generation.deltas`` does.
    """
    deltas = generation.deltas()
    try:
        first = await anext(deltas)
        if body.stream:
            include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return EventStream(events(request, first, deltas, writer, include_usage), generation.close)
        async for _ in deltas:
            pass
        whole = writer.whole()
    except BaseException:
        generation.close()
        raise
    generation.close()
    return Response(whole.model_dump_json(exclude_unset=True), media_type="application/json")


async def events(
    request: Request,
    first: CompletionDelta,
    rest: AsyncIterator[CompletionDelta],
    writer: Writer,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Whatever happens, the last event but ``[DONE]`` says how it ended."""
    try:
        for chunk in writer.chunks(first):
            yield event(chunk)
        async for delta in rest:
            for chunk in writer.chunks(delta):
                yield event(chunk)
        if include_usage:
            yield event(writer.last_chunk())
    except Exception as error:
        problem = api_error(error)
        if problem.status_code == 500:
            log.exception("a stream has failed")
        record_of(request).note(problem)
        yield event(problem.body)
    yield DONE
