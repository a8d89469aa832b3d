"""``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, Field, model_validator

from penstock.server.http.errors import error_responses
from penstock.server.openai.chat_protocol import Message, Tool
from penstock.server.openai.field_errors import api_errors
from penstock.server.openai.lenience import ApiModel
from penstock.server.openai.prompts import Prompt
from penstock.server.openai.protocol import ListOf
from penstock.server.openai.service import Service


class TokenizeRequest(ApiModel):
    """Either a text, or a conversation that the chat template turns into one."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[Message] | None = Field(None, min_length=1)
    tools: ListOf[Tool] | None = None
    add_special_tokens: bool | None = None
    """For a prompt: whether it gets the tokenizer's own first token; by default it does."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def has_one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt is needed, or messages; give one of them, and not both")
        if self.messages is None and self.tools is not None:
            raise ValueError("tools is for messages; remove it")
        if self.prompt is None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens is for a prompt: the chat template has its own; remove it")
        return self


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(ApiModel):
    model: str | None = None
    tokens: ListOf[int]


class Text(BaseModel):
    prompt: str


def token_router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["tokens"], responses=error_responses(400, 401, 404, 408, 413))
    prompts = service.prompts

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokens:
        """The token ids of a text or a conversation."""
        service.check_model(body.model)
        with api_errors(body):
            found = await encoded(body)
        names = await prompts.names(found.token_ids) if body.return_token_strs else None
        return Tokens(
            count=len(found.token_ids),
            max_model_len=prompts.max_model_len,
            tokens=found.token_ids,
            token_strs=names,
        )

    async def encoded(body: TokenizeRequest) -> Prompt:
        if body.prompt is not None:
            return await prompts.of_text(body.prompt, body.add_special_tokens is not False)
        return await prompts.of_chat(body.messages or [], body.tools)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Text:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        return Text(prompt=(await prompts.of_ids(body.tokens, "tokens")).text)

    return routes
