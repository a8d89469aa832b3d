"""From a generation to its response: streamed or whole, or an error if it fails."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from penstock.engine.completion import CompletionDelta
from penstock.engine.empty import words_of_empty
from penstock.server.http.errors import TIMEOUT, ApiError, api_error
from penstock.server.http.records import record_of
from penstock.server.http.sse import DONE, EventStream, event
from penstock.server.openai.choices import Choice, ChoiceDelta
from penstock.server.openai.field_errors import api_errors
from penstock.server.openai.generation import Generation
from penstock.server.openai.protocol import GenerationFields, WithWarning
from penstock.server.openai.usage import Summary
from penstock.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Writer(Protocol):
    """The interface that puts choices into one API's form."""

    continues_text: bool
    """Whether prompts are continued as they stand, without a chat template."""
    named_events: bool
    """Whether events are named by their ``type``. A stream of nameless events ends with ``[DONE]``."""

    def whole(self, choices: Sequence[ChoiceDelta], summary: Summary) -> WithWarning:
        """The reply to a request that is not streamed. Each choice is one delta."""
        ...

    def chunks(self, delta: ChoiceDelta) -> Iterator[BaseModel]:
        """The chunks for a delta, if it has any."""
        ...

    def last_chunks(self, summary: Summary) -> Iterator[BaseModel]:
        """The chunks after all choices have ended, which carry usage and metrics."""
        ...

    def failure(self, problem: ApiError) -> BaseModel:
        """The last event of a stream that failed."""
        ...


async def reply_of(
    request: Request,
    body: GenerationFields,
    generation: Generation,
    choices: Sequence[Choice],
    writer: Writer,
    names: Mapping[str, str],
    tokenizer: Tokenizer,
) -> Response:
    """Wait for the first token, so that an earlier failure gets a status of its own; then stream or collect.

    The generation is closed here, or once the stream has been sent. ``names`` maps Penstock's names of fields to the
    request's. Raises ApiError where the generation fails.
    """
    deltas = named_errors(generation.deltas(), body, names)
    try:
        first = await anext(deltas)
        if body.stream:
            news = warned(first, deltas, choices, tokenizer, plain_text=writer.continues_text)
            return EventStream(events(request, generation, news, writer), generation.close, body.warning_headers())
        late = await rest_of(deltas)
        completions = generation.whole()
        warning = late or words_of_empty(completions, tokenizer, plain_text=writer.continues_text)
        found = [choice.push(completion) for choice, completion in zip(choices, completions, strict=True)]
        whole = writer.whole(found, generation.summary())
        if warning is not None:
            whole.warning = warning
    except BaseException:
        generation.close()
        raise
    generation.close()
    return Response(whole.model_dump_json(exclude_unset=True), 200, body.warning_headers(), "application/json")


async def rest_of(deltas: AsyncIterator[CompletionDelta]) -> str | None:
    """Wait for the last token. If the time is up before, return a warning: the text so far is then the reply."""
    try:
        async for _ in deltas:
            pass
    except ApiError as error:
        if error.code != TIMEOUT:
            raise
        return f"{error.detail}; the text is what there was by then"
    return None


async def named_errors(
    deltas: AsyncIterator[CompletionDelta], body: GenerationFields, names: Mapping[str, str]
) -> AsyncGenerator[CompletionDelta, None]:
    """Every delta; errors name fields as the request does."""
    with api_errors(body, names):
        async for delta in deltas:
            yield delta


async def warned(
    first: CompletionDelta,
    rest: AsyncIterator[CompletionDelta],
    choices: Sequence[Choice],
    tokenizer: Tokenizer,
    *,
    plain_text: bool,
) -> AsyncIterator[ChoiceDelta]:
    """Every delta, after its choice has processed it; a warning says why an empty answer is empty."""
    async for delta in following(first, rest):
        new = choices[delta.index].push(delta)
        yield replace(new, warning=words_of_empty([delta], tokenizer, plain_text=plain_text)) if new.first else new


async def following(first: CompletionDelta, rest: AsyncIterator[CompletionDelta]) -> AsyncIterator[CompletionDelta]:
    yield first
    async for delta in rest:
        yield delta


async def events(
    request: Request, generation: Generation, deltas: AsyncIterator[ChoiceDelta], writer: Writer
) -> AsyncGenerator[bytes, None]:
    """The stream's events. In any case the last one before ``[DONE]`` says how the generation ended."""
    try:
        async for delta in deltas:
            for chunk in writer.chunks(delta):
                yield framed(chunk, writer)
        for chunk in writer.last_chunks(generation.summary()):
            yield framed(chunk, writer)
    except Exception as error:
        problem = api_error(error)
        if problem.status_code == 500:
            log.exception("a stream has failed")
        record_of(request).note(problem)
        yield framed(writer.failure(problem), writer)
    if not writer.named_events:
        yield DONE


def framed(chunk: BaseModel, writer: Writer) -> bytes:
    return event(chunk, getattr(chunk, "type", "") if writer.named_events else "")
