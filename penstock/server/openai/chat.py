"""``/v1/chat/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.server.openai.chat_protocol import ChatCompletion, ChatCompletionRequest
from penstock.server.openai.chat_writer import ChatWriter
from penstock.server.openai.params import chat_params
from penstock.server.openai.protocol import generation_responses
from penstock.server.openai.reply import reply_of
from penstock.server.openai.service import Service, named
from penstock.server.openai.tools.choice import plan_tools


def chat_router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["generation"])
    responses = generation_responses("ChatCompletionChunk")

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=responses)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        with named(body):
            plan = plan_tools(body, service.prompts.tokenizer)
            prompt = await service.prompts.of_chat(body.messages, plan.told, body.chat_template_kwargs)
            room = service.prompts.room(prompt, "messages")
            asked = chat_params(body, service.defaults(), room, plan)
        with named(body, asked.names):
            generation = await service.generate(request, body, [prompt], [asked])
        writer = ChatWriter(body, plan, generation, service.model, service.prompts.tokenizer)
        return await reply_of(request, generation, writer, body)

    return routes
