"""Replies, at once or in chunks, and ``/v1/completions``, the route whose replies are nothing but text."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from penstock.core import CompletionOutput, FinishReason, Logprob
from penstock.engine.completion import CompletionDelta, words_of_empty
from penstock.server.http.errors import (
    DONE,
    TIMEOUT,
    ApiError,
    ErrorResponse,
    EventStream,
    api_error,
    api_errors,
    event,
    invalid_field,
)
from penstock.server.http.middleware import record_of
from penstock.server.openai.generation import Call, Generation, Service, Summary, metrics_of, usage_of
from penstock.server.openai.params import Prompt, Prompts, completion_params
from penstock.server.openai.protocol import (
    MOST_CHOICES,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    FinishWord,
    GenerationFields,
    TokenLogprob,
    TopLogprob,
    WithWarning,
    generation_responses,
)
from penstock.server.openai.tools import ReplyDelta, ReplyPlan, ReplyStream, ToolCallDelta
from penstock.text.detokenizer import StreamDecoder
from penstock.text.tokenizer import Tokenizer
from penstock.text.workers import aside

# ------------------------------------------------------------------------------------------------------------- logprobs
# Log-probabilities in the forms of the chat and completions APIs.

TokenBytes = Callable[[int], bytes]
"""Gives a token's own bytes, which may be part of a character."""
LEAST: Final = -9999.0
"""Value sent for minus infinity, which JSON lacks; the same as OpenAI's and vLLM's."""


def text_of(token: bytes) -> str:
    """A token's bytes as text. Incomplete characters become U+FFFD, so that several tokens may have the same text."""
    return token.decode(errors="replace")


def chat_logprobs(
    ids: Sequence[int], found: Sequence[dict[int, Logprob]], top: int, token_bytes: TokenBytes
) -> ChatLogprobs:
    """Log-probabilities in the chat API's form, each with the ``top`` most probable tokens at its place."""
    content = []
    for token, entry in zip(ids, found, strict=True):
        chosen, best = of_token(token, entry[token], token_bytes), ranked(entry, top)
        content.append(
            TokenLogprob(
                token=chosen.token,
                logprob=chosen.logprob,
                bytes=chosen.bytes,
                top_logprobs=[of_token(other, logprob, token_bytes) for other, logprob in best],
            )
        )
    return ChatLogprobs(content=content, refusal=None)


def completion_logprobs(
    ids: Sequence[int], found: Sequence[dict[int, Logprob]], token_bytes: TokenBytes, offsets: list[int]
) -> CompletionLogprobs:
    """Log-probabilities of a completion; ``offsets`` are the tokens' places in the text."""
    return CompletionLogprobs(
        tokens=[text_of(token_bytes(token)) for token in ids],
        token_logprobs=[finite(entry[token].logprob) for token, entry in zip(ids, found, strict=True)],
        top_logprobs=[best_by_text(entry, token_bytes) for entry in found],
        text_offset=offsets,
    )


def best_by_text(entry: dict[int, Logprob], token_bytes: TokenBytes) -> dict[str, float]:
    """The log-probability of each text; of several tokens with the same text the highest."""
    best: dict[str, float] = {}
    for token, one in entry.items():
        text = text_of(token_bytes(token))
        best[text] = max(finite(one.logprob), best.get(text, LEAST))
    return best


class TextOffsets:
    """The positions of tokens in a choice's text, in characters from its beginning.

    A token within a character has that character's position, and a token that the text leaves out has the next one's.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._decoder = StreamDecoder(tokenizer, prompt_ids, skip_special_tokens)
        self._byte_ids = tokenizer.byte_ids
        self._token_bytes = tokenizer.token_bytes
        self._characters = 0
        """Number of final characters so far."""
        self._run = b""
        """Bytes of the byte-fallback tokens since then: the decoder waits for the end of such a run."""

    def of(self, ids: Sequence[int]) -> list[int]:
        """The positions of the next tokens."""
        return [self._place_of(token) for token in ids]

    def _place_of(self, token: int) -> int:
        """The position of the next token."""
        # Taken before the token is decoded: it stands behind all that came before it.
        place = self._characters + len(self._run.decode(errors="ignore"))
        self._characters += len(self._decoder.append(token))
        self._run = self._run + self._token_bytes(token) if token in self._byte_ids else b""
        return place


def of_token(token: int, logprob: Logprob, token_bytes: TokenBytes) -> TopLogprob:
    """A token with its text, its bytes and its log-probability."""
    own = token_bytes(token)
    return TopLogprob(token=text_of(own), logprob=finite(logprob.logprob), bytes=list(own))


def ranked(entry: dict[int, Logprob], top: int) -> list[tuple[int, Logprob]]:
    """The ``top`` most probable tokens, best first. ``entry`` may hold the chosen token besides, with a lower rank."""
    return sorted((pair for pair in entry.items() if pair[1].rank <= top), key=lambda pair: pair[1].rank)


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(logprob, LEAST)


# -------------------------------------------------------------------------------------------------------------- choices
# A generation's choices as they grow, between the engine's deltas and the API's writers.

REST: Final[dict[FinishReason, FinishWord]] = {
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}
"""Ends that are no stop -> OpenAI's words for them, and this server's."""


@dataclass(frozen=True)
class ChoiceDelta:
    """The new part of one choice, in the form that writers need.

    ``index`` counts over all prompts of a request; ``first`` is true for a choice's first delta. ``places`` are the
    tokens' positions in the text, where log-probabilities are asked for. ``reasoning`` is the text before the answer
    proper. ``warning`` comes with the end of a streamed choice without text. ``points`` are new texts of points
    (number, text), where the answer is made of points.
    """

    index: int
    first: bool
    content: str
    tool_calls: list[ToolCallDelta]
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    places: list[int]
    finish_reason: FinishWord | None
    stop_reason: int | str | None
    warning: str | None = None
    points: tuple[tuple[int, str], ...] = ()
    reasoning: str = ""


class Choice:
    """One choice of a reply, made from the deltas that are pushed into it: one after the other, or all in one.

    It stores only what later deltas need of earlier ones; the engine's stream holds the tokens and the text.
    ``token_bytes`` gives the bytes of a token. If an end token in ``hidden_ends`` ends the choice, that token's text is
    cut off. ``places`` finds the offsets of tokens in the text.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        plan: ReplyPlan | None = None,
        hidden_ends: Collection[int] = (),
        places: TextOffsets | None = None,
    ) -> None:
        self._token_bytes = token_bytes
        self._reply = ReplyStream(plan or ReplyPlan())
        self._hidden_ends = hidden_ends
        self._places = places
        self._begun = self._resumed = False

    def resume(self, came: CompletionOutput) -> None:
        """Read what the client has of an earlier run, so that later deltas go on from there."""
        self._reply.push(came.text, False)
        if self._places is not None:
            self._places.of(came.token_ids)
        self._begun = self._resumed = True

    def push(self, delta: CompletionDelta) -> ChoiceDelta:
        """The new part of the choice, from the engine's; with the last one also what was held back."""
        # The reader may hold text back that could begin a call or a mark: what comes out lags behind what goes in.
        news = self._reply.push(self._visible_text(delta), delta.finish_reason is not None)
        if self._resumed and not delta.token_ids and delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            news = ReplyDelta("", "", [])  # it had ended before, and the client has what was held back until then
        placed = self._places is not None and delta.logprobs is not None
        new = ChoiceDelta(
            index=delta.index,
            first=not self._begun,
            content=news.content,
            tool_calls=news.calls,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            places=self._places.of(delta.token_ids) if placed and self._places is not None else [],
            finish_reason=self._finish_word(delta.finish_reason),
            stop_reason=delta.stop_reason,
            points=delta.points,
            reasoning=news.reasoning,
        )
        self._begun = True
        return new

    def _visible_text(self, delta: CompletionDelta) -> str:
        """A delta's text, without that of an end token that is in it only for reading marks."""
        ids = delta.token_ids
        if delta.finish_reason is FinishReason.STOP and ids and ids[-1] in self._hidden_ends:
            return delta.text.removesuffix(text_of(self._token_bytes(ids[-1])))
        return delta.text

    def _finish_word(self, reason: FinishReason | None) -> FinishWord | None:
        """OpenAI's word for the end: a reply that ended by itself and holds calls has ended with "tool_calls"."""
        if reason is None:
            return None
        if reason is FinishReason.STOP:
            return "tool_calls" if self._reply.calls else "stop"
        return REST[reason]


# ---------------------------------------------------------------------------------------------------------------- reply
# From a generation to its response: streamed or whole, or an error if it fails.

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


async def reply_of(generation: Generation, choices: Sequence[Choice], writer: Writer, tokenizer: Tokenizer) -> Response:
    """Wait for the first token, so that an earlier failure gets a status of its own; then stream or collect.

    The generation is closed here, or once the stream has been sent. Raises ApiError where the generation fails.
    """
    body = generation.call.body
    deltas = named_errors(generation.deltas(), body, generation.call.names)
    try:
        # Read before the first delta, so that the stream goes on where the client's copy ends.
        if body.stream:
            await aside(partial(resume, choices, generation.resumed))
        first = await anext(deltas)
        if body.stream:
            # From here on the stream closes the generation, however it ends (``EventStream``).
            news = warned(first, deltas, choices, tokenizer, plain_text=writer.continues_text)
            return EventStream(events(generation, news, writer), generation.close, body.warning_headers())
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


def resume(choices: Sequence[Choice], came: Sequence[CompletionOutput]) -> None:
    """Have choices go on from what their client has. Reading many tokens takes a while."""
    for one in came:
        choices[one.index].resume(one)


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
    """The first delta, which has been awaited already, and then the others."""
    yield first
    async for delta in rest:
        yield delta


async def events(
    generation: Generation, deltas: AsyncIterator[ChoiceDelta], writer: Writer
) -> AsyncGenerator[bytes, None]:
    """The stream's events. In any case the last one before ``[DONE]`` says how the generation ended."""
    try:
        async for delta in deltas:
            for chunk in writer.chunks(delta):
                yield framed(chunk, writer)
        for chunk in writer.last_chunks(generation.summary()):
            yield framed(chunk, writer)
    # The status has been sent: an error can only be the stream's last event.
    except Exception as error:
        problem = api_error(error)
        if problem.status_code == 500:
            log.exception("a stream has failed")
        generation.call.record.note(problem)
        yield framed(writer.failure(problem), writer)
    if not writer.named_events:
        yield DONE


def framed(chunk: BaseModel, writer: Writer) -> bytes:
    """A chunk as an event, with a name where the API has them."""
    return event(chunk, getattr(chunk, "type", "") if writer.named_events else "")


# ---------------------------------------------------------------------------------------------------- completion writer
# The writer of /v1/completions: choices as one reply or in chunks.


class CompletionWriter:
    """The writer of ``n`` choices for each of the prompts, in their order. It keeps no state."""

    named_events = False

    continues_text = True

    def __init__(
        self,
        body: CompletionRequest,
        prompts: Sequence[Prompt],
        n: int,
        request_id: str,
        model: str,
        token_bytes: TokenBytes,
        seeds: Sequence[int] = (),
    ) -> None:
        """``seeds`` are those of the prompts."""
        self._body = body
        self._prompts = prompts
        self._n, self._seeds = n, seeds
        self._id, self._model, self._created = f"cmpl-{request_id}", model, int(time.time())
        self._token_bytes = token_bytes

    def whole(self, choices: Sequence[ChoiceDelta], summary: Summary) -> Completion:
        return self._with_summary(self._reply([self._choice(choice) for choice in choices]), summary)

    def chunks(self, delta: ChoiceDelta) -> Iterator[Completion]:
        choice = self._choice(delta)
        if choice.text or delta.finish_reason or delta.logprobs or self._body.return_token_ids:
            reply = self._reply([choice])
            if delta.warning is not None:
                reply.warning = delta.warning
            yield reply

    def last_chunks(self, summary: Summary) -> Iterator[Completion]:
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield self._with_summary(self._reply([]), summary)

    def failure(self, problem: ApiError) -> ErrorResponse:
        return problem.body

    # ---------------------------------------------------------------------------------------------------- inside

    def _reply(self, choices: list[CompletionChoice]) -> Completion:
        """A reply or chunk of these choices."""
        reply = Completion(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices
        )
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            reply.usage = None  # OpenAI sends null in all chunks but the last
        return reply

    def _with_summary(self, reply: Completion, summary: Summary) -> Completion:
        """The reply with its usage and metrics."""
        reply.usage, reply.metrics = usage_of(summary), metrics_of(summary)
        return reply

    def _choice(self, delta: ChoiceDelta) -> CompletionChoice:
        """A choice, or its new part, in the API's form."""
        # Choices are numbered over all prompts, ``n`` to a prompt.
        prompt = self._prompts[delta.index // self._n]
        choice = CompletionChoice(
            index=delta.index,
            text=prompt.text + delta.content if self._body.echo and delta.first else delta.content,
            logprobs=None,
            finish_reason=delta.finish_reason,
        )
        if delta.logprobs is not None:
            choice.logprobs = completion_logprobs(delta.token_ids, delta.logprobs, self._token_bytes, delta.places)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
            if delta.first:
                choice.prompt_token_ids = prompt.token_ids
                if self._seeds:
                    choice.seed = self._seeds[delta.index // self._n]
        return choice


# ---------------------------------------------------------------------------------------------------------- completions
# ``/v1/completions``.


def completion_router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/completions", response_model=Completion, responses=generation_responses("Completion"))
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, or several."""
        service.check_model(body.model)
        with api_errors(body):
            prompts = await prompts_of(body, service.prompts)
            defaults = service.defaults()
            params = [completion_params(body, defaults, service.prompts.room(prompt, "prompt")) for prompt in prompts]
        with api_errors(body, params[0].names):
            generation = await service.generate(Call(request, body, prompts, params, params[0].names))
        choices = [Choice(service.token_bytes, places=places) for places in text_offsets(service, body, prompts)]
        name = record_of(request).request_id
        writer = CompletionWriter(
            body, prompts, generation.n, name, service.model, service.token_bytes, generation.seeds
        )
        return await reply_of(generation, choices, writer, service.prompts.tokenizer)

    return routes


async def prompts_of(body: CompletionRequest, prompts: Prompts) -> list[Prompt]:
    """The request's prompts. Raises RequestError for invalid Unicode, ApiError for unknown ids and too many choices."""
    given, special = body.prompt, body.add_special_tokens is not False
    if isinstance(given, list) and not isinstance(given[0], int) and len(given) * (body.n or 1) > MOST_CHOICES:
        raise invalid_field(
            "n", f"is {body.n}, which makes more than {MOST_CHOICES} choices of {len(given)} prompts; ask for fewer"
        )
    if isinstance(given, str):
        return [await prompts.of_text(given, special)]
    if isinstance(given[0], int):
        return [await prompts.of_ids(given)]
    return [await (prompts.of_text(one, special) if isinstance(one, str) else prompts.of_ids(one)) for one in given]


def text_offsets(service: Service, body: CompletionRequest, prompts: list[Prompt]) -> list[TextOffsets | None]:
    """For each choice a TextOffsets that finds tokens in its text; None where no log-probabilities are asked for."""
    tokenizer, skip = service.prompts.tokenizer, body.skip_special_tokens is not False
    if body.logprobs is None:
        return [None] * (len(prompts) * (body.n or 1))
    return [TextOffsets(tokenizer, prompt.token_ids, skip) for prompt in prompts for _ in range(body.n or 1)]
