"""``/v1/responses``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.server.http.errors import ApiError
from penstock.server.http.records import record_of
from penstock.server.openai.chat import start_chat
from penstock.server.openai.protocol import generation_responses
from penstock.server.openai.reply import reply_of
from penstock.server.openai.responses.as_chat import NAMES, as_chat, in_own_words
from penstock.server.openai.responses.objects import ResponseObject
from penstock.server.openai.responses.protocol import ResponsesRequest
from penstock.server.openai.responses.writer import ResponseWriter
from penstock.server.openai.service import Service


def responses_router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["generation"])
    told = generation_responses("event of OpenAI's Responses API")

    @routes.post("/v1/responses", response_model=ResponseObject, responses=told)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, in the words of OpenAI's Responses API. Nothing is kept."""
        chat = as_chat(body)
        with in_own_words():
            begun = await start_chat(service, chat, request)
            writer = ResponseWriter(body, record_of(request).request_id, service.model)
            names = begun.names | NAMES
            return await reply_of(request, chat, begun.generation, begun.choices, writer, names, begun.tokenizer)

    @routes.api_route("/v1/responses/{name:path}", methods=["GET", "DELETE", "POST"], include_in_schema=False)
    async def kept_response(name: str) -> None:
        raise ApiError(404, f"there is no response {name!r}: none is kept here", code="unsupported")

    return routes
