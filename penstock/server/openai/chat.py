"""``/v1/chat/completions``: the route, and its replies at once or in chunks."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.core import OutlineOutput
from penstock.server.http.errors import ApiError, ErrorResponse, api_errors, invalid_field
from penstock.server.openai.generation import Call, Generation, Service, Summary, metrics_of, usage_of
from penstock.server.openai.params import Prompt, chat_params
from penstock.server.openai.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    FunctionPart,
    FunctionReply,
    MessagePart,
    MessageReply,
    OutlineReply,
    PointPart,
    ToolCallPart,
    ToolCallReply,
    WithSeed,
    generation_responses,
)
from penstock.server.openai.reply import Choice, ChoiceDelta, TokenBytes, chat_logprobs, reply_of
from penstock.server.openai.tools import GUIDED, ReplyPlan, ToolCallDelta, plan_reply, plan_tools
from penstock.text.tokenizer import Tokenizer

# ---------------------------------------------------------------------------------------------------------- chat writer
# The writer of /v1/chat/completions: choices as one reply or in chunks.


class ChatWriter:
    """The writer of one request's reply. Its only state is which choices have begun."""

    named_events = False
    continues_text = False

    def __init__(
        self,
        body: ChatCompletionRequest,
        prompt: Prompt,
        request_id: str,
        model: str,
        token_bytes: TokenBytes,
        outline: OutlineOutput | None = None,
        seeds: Sequence[int] = (),
        begun: Collection[int] = (),
    ) -> None:
        """``outline`` is reported for an answer in points; the engine fills it in until the first token has come.

        ``seeds`` holds the prompt's, if it has one. ``begun`` are the choices of which an earlier reply has told.
        """
        self._body = body
        self._prompt = prompt
        self._id, self._model, self._created = f"chatcmpl-{request_id}", model, int(time.time())
        self._token_bytes = token_bytes
        self._outline = outline
        self._seeds = seeds
        self._begun = set(begun)
        """Choices of which a chunk has been written."""

    def whole(self, choices: Sequence[ChoiceDelta], summary: Summary) -> ChatCompletion:
        reply = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[self._choice(choice) for choice in choices],
            usage=usage_of(summary),
            metrics=metrics_of(summary),
        )
        if self._body.return_token_ids:
            self._tell_beginning(reply)
        if self._outline is not None:
            reply.outline = outline_reply(self._outline)
        return reply

    def chunks(self, delta: ChoiceDelta) -> Iterator[ChatCompletionChunk]:
        part = MessagePart()
        if delta.reasoning:
            part.reasoning_content = delta.reasoning
        if delta.content:
            part.content = delta.content
        if delta.tool_calls:
            part.tool_calls = [call_part(call) for call in delta.tool_calls]
        told = part.model_fields_set or delta.finish_reason or delta.logprobs or delta.points
        if not (told or self._body.return_token_ids):
            return  # only part of a character, or the possible beginning of a call
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            yield self._first_chunk(delta)
        choice = ChatChunkChoice(
            index=delta.index,
            delta=part,
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
        )
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        chunk = self._chunk([choice])
        if delta.warning is not None:
            chunk.warning = delta.warning
        if delta.points:
            chunk.outline_points = [PointPart(point=number, text=text) for number, text in delta.points]
        yield chunk

    def last_chunks(self, summary: Summary) -> Iterator[ChatCompletionChunk]:
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            chunk = self._chunk([])
            chunk.usage, chunk.metrics = usage_of(summary), metrics_of(summary)
            yield chunk

    def failure(self, problem: ApiError) -> ErrorResponse:
        return problem.body

    # ---------------------------------------------------------------------------------------------------- inside

    def _first_chunk(self, delta: ChoiceDelta) -> ChatCompletionChunk:
        """A chunk with the role alone. Content is null if reasoning or a call comes first: text may never follow."""
        index, silent = delta.index, (delta.tool_calls or delta.reasoning) and not delta.content
        part = MessagePart(role="assistant", content=None if silent else "")
        chunk = self._chunk([ChatChunkChoice(index=index, delta=part, logprobs=None, finish_reason=None)])
        if self._body.return_token_ids and index == 0:
            self._tell_beginning(chunk)
        if self._outline is not None:
            chunk.outline = outline_reply(self._outline)
        return chunk

    def _tell_beginning(self, reply: WithSeed) -> None:
        """State what the choices go on from: the prompt's tokens, and the seed of its noise."""
        reply.prompt_token_ids = self._prompt.token_ids
        if self._seeds:
            reply.seed = self._seeds[0]

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        """A chunk of these choices."""
        chunk = ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=choices,
        )
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            chunk.usage = None  # OpenAI sends null in all chunks but the last
        return chunk

    def _choice(self, whole: ChoiceDelta) -> ChatChoice:
        """A whole choice in the API's form."""
        assert whole.finish_reason is not None
        content = whole.content or (None if whole.tool_calls else "")
        message = MessageReply(role="assistant", content=content, refusal=None)
        if whole.reasoning:
            message.reasoning_content = whole.reasoning
        if whole.tool_calls:
            message.tool_calls = [call_reply(call) for call in whole.tool_calls]
        choice = ChatChoice(
            index=whole.index,
            message=message,
            logprobs=self._logprobs(whole),
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = whole.token_ids
        return choice

    def _logprobs(self, delta: ChoiceDelta) -> ChatLogprobs | None:
        """A choice's log-probabilities, if they were asked for."""
        if delta.logprobs is None:
            return None
        return chat_logprobs(delta.token_ids, delta.logprobs, self._body.top_logprobs or 0, self._token_bytes)


def outline_reply(outline: OutlineOutput) -> OutlineReply:
    """The report on an answer in points, in the API's form."""
    return OutlineReply(used=outline.used, reason=outline.reason, kind=outline.kind, titles=outline.titles)


def call_part(call: ToolCallDelta) -> ToolCallPart:
    """A call in a chunk: its beginning with id and name, or more of its arguments."""
    if not call.name:
        return ToolCallPart(index=call.index, function=FunctionPart(arguments=call.arguments))
    function = FunctionPart(name=call.name, arguments=call.arguments)
    return ToolCallPart(index=call.index, id=call.id, type="function", function=function)


def call_reply(call: ToolCallDelta) -> ToolCallReply:
    """A whole call in one piece."""
    function = FunctionReply(name=call.name, arguments=call.arguments)
    return ToolCallReply(id=call.id, type="function", function=function)


# ----------------------------------------------------------------------------------------------------------------- chat
# ``/v1/chat/completions``.

NO_NAMES: Final[Mapping[str, str]] = {}
"""No other names of fields than the request's own."""
FORMS: Final = ("tools", "response_format", "structured_outputs", *(f"guided_{kind}" for kind in GUIDED))
"""Fields that ask for a form of the answer."""
EFFORT, SWITCH = "reasoning_effort", "enable_thinking"
"""Variables of chat templates: how much to think, and whether."""
NONE: Final = "none"
"""OpenAI's effort for no reasoning at all."""


def chat_router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["generation"])
    responses = generation_responses("ChatCompletionChunk")

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=responses)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        begun = await start_chat(service, body, request)
        generation = begun.generation
        writer = ChatWriter(
            body,
            generation.call.prompts[0],
            generation.call.record.request_id,
            service.model,
            service.token_bytes,
            generation.outline,
            generation.seeds,
            [one.index for one in generation.resumed] if body.stream else (),
        )
        return await reply_of(generation, begun.choices, writer, service.prompts.tokenizer)

    return routes


@dataclass(frozen=True)
class Begun:
    """A conversation whose answer has begun."""

    generation: Generation
    choices: list[Choice]


async def start_chat(
    service: Service, body: ChatCompletionRequest, request: Request, names: Mapping[str, str] = NO_NAMES
) -> Begun:
    """Submit the conversation to the engine. Raises ApiError naming the field for what cannot be answered.

    ``names`` maps fields of ``body`` to those that the client's request has in their place.
    """
    service.check_model(body.model)
    with api_errors(body):
        tokenizer = service.prompts.tokenizer
        tools = plan_tools(body, tokenizer)
        prompt = await service.prompts.of_chat(body.messages, tools.tools, template_variables(body))
        plan = plan_reply(body, tools, prompt.text, tokenizer)
        room = service.prompts.room(prompt, "messages")
        params = chat_params(body, service.defaults(), room, plan)
    call = Call(request, body, [prompt], [params], {**params.names, **names})
    with api_errors(body, params.names):
        if body.outline_decoding in (None, "off"):
            generation = await service.generate(call)
        else:
            refuse_with_points(body)
            dialogue = service.prompts.dialogue(body.messages, template_variables(body))
            generation = await service.generate_in_points(call, dialogue, body.outline_decoding)
    ends = hidden_ends(body, plan, tokenizer)
    choices = [Choice(service.token_bytes, plan, ends) for _ in range(generation.choices)]
    return Begun(generation, choices)


def template_variables(body: ChatCompletionRequest) -> dict[str, Any] | None:
    """Variables for the chat template from the request's own fields; ``chat_template_kwargs`` override them."""
    found: dict[str, Any] = {}
    if body.reasoning_effort == NONE:
        found[SWITCH] = False
    elif body.reasoning_effort is not None:
        found[EFFORT] = body.reasoning_effort
    if body.enable_thinking is not None:
        found[SWITCH] = body.enable_thinking
    return found | (body.chat_template_kwargs or {}) or None


def refuse_with_points(body: ChatCompletionRequest) -> None:
    """Raise ApiError, naming the field, for fields that exclude points: a form of the answer, or its beginning."""
    if body.penstock_resume is not None:
        raise invalid_field("penstock_resume", "does not go with outline_decoding: ask for the points anew")
    for name in FORMS:
        if getattr(body, name):
            raise invalid_field(name, "does not go with outline_decoding, whose answer is text in points; remove one")


def hidden_ends(body: ChatCompletionRequest, plan: ReplyPlan, tokenizer: Tokenizer) -> Sequence[int]:
    """The end tokens to cut off, if special tokens are in the text only for reading calls or reasoning."""
    return tokenizer.eos_token_ids if plan.marks_are_special and body.skip_special_tokens is not False else ()
