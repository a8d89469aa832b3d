"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.server.http.errors import invalid_field
from penstock.server.http.records import record_of
from penstock.server.openai.chat_protocol import ChatCompletion, ChatCompletionRequest
from penstock.server.openai.chat_writer import ChatWriter
from penstock.server.openai.choices import Choice
from penstock.server.openai.field_errors import api_errors
from penstock.server.openai.generation import Generation
from penstock.server.openai.params import chat_params
from penstock.server.openai.prompts import Prompt
from penstock.server.openai.protocol import generation_responses
from penstock.server.openai.reasoning import template_variables
from penstock.server.openai.reply import reply_of
from penstock.server.openai.service import Service
from penstock.server.openai.structures import GUIDED
from penstock.server.openai.tools.choice import ReplyPlan, plan_reply, plan_tools
from penstock.text.tokenizer import Tokenizer

NOT_IN_POINTS: Final = ("tools", "response_format", "structured_outputs", *(f"guided_{kind}" for kind in GUIDED))


def chat_router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["generation"])
    responses = generation_responses("ChatCompletionChunk")

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=responses)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        begun = await start_chat(service, body, request)
        name, outline = record_of(request).request_id, begun.generation.outline
        writer = ChatWriter(body, begun.prompt, name, service.model, service.token_bytes, outline)
        return await reply_of(request, body, begun.generation, begun.choices, writer, begun.names, begun.tokenizer)

    return routes


@dataclass(frozen=True)
class Begun:
    """A conversation whose answer has begun. ``names`` maps Penstock's names of fields to the request's."""

    prompt: Prompt
    generation: Generation
    choices: list[Choice]
    names: dict[str, str]
    tokenizer: Tokenizer


async def start_chat(service: Service, body: ChatCompletionRequest, request: Request) -> Begun:
    """Submit the conversation to the engine. Raises ApiError naming the field for what cannot be answered."""
    service.check_model(body.model)
    with api_errors(body):
        tokenizer = service.prompts.tokenizer
        tools = plan_tools(body, tokenizer)
        prompt = await service.prompts.of_chat(body.messages, tools.tools, template_variables(body))
        plan = plan_reply(body, tools, prompt.text, tokenizer)
        room = service.prompts.room(prompt, "messages")
        params = chat_params(body, service.defaults(), room, plan)
    with api_errors(body, params.names):
        if body.outline_decoding in (None, "off"):
            generation = await service.generate(request, body, [prompt], [params])
        else:
            refuse_with_points(body)
            dialogue = service.prompts.dialogue(body.messages, template_variables(body))
            generation = await service.generate_in_points(request, body, prompt, params, dialogue)
    ends = hidden_ends(body, plan, tokenizer)
    choices = [Choice(service.token_bytes, plan, ends) for _ in range(generation.choices)]
    return Begun(prompt, generation, choices, params.names, tokenizer)


def refuse_with_points(body: ChatCompletionRequest) -> None:
    """Raise ApiError, naming the field, for fields that give the answer a form, which excludes points."""
    for name in NOT_IN_POINTS:
        if getattr(body, name):
            raise invalid_field(name, "does not go with outline_decoding, whose answer is text in points; remove one")


def hidden_ends(body: ChatCompletionRequest, plan: ReplyPlan, tokenizer: Tokenizer) -> Sequence[int]:
    """The end tokens to cut off, if special tokens are in the text only for reading calls or reasoning."""
    return tokenizer.eos_token_ids if plan.marks_are_special and body.skip_special_tokens is not False else ()
