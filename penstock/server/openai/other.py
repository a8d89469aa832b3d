"""The other routes of the API: models, tokenization, and those that are not supported."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Final, Literal

from fastapi import APIRouter
from pydantic import BaseModel, model_validator

from penstock.server.http.errors import ApiError, api_errors, error_responses
from penstock.server.openai.generation import Service
from penstock.server.openai.params import Prompt
from penstock.server.openai.protocol import ApiModel, ListOf, Message, Tool, Unread
from penstock.text.chat import chat_sampling

# --------------------------------------------------------------------------------------------------------------- models
# ``/v1/models``: the model, under each of its names.


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    numerics: str
    """``LLM.numerics``: "exact" or "fast"."""
    chat_sampling: dict[str, float]
    """Default sampling parameters of chats: those that the checkpoint recommends, or else greedy."""


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


def model_router(service: Service) -> APIRouter:
    """The routes that list the model."""
    routes = APIRouter(tags=["server"])
    started = int(time.time())

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            object="model",
            created=started,
            owned_by="penstock",
            root=service.llm.setup.options.model,
            max_model_len=service.prompts.max_model_len,
            numerics=service.llm.numerics,
            chat_sampling=chat_sampling(service.llm.setup.checkpoint.sampling_defaults),
        )

    @routes.get("/v1/models", responses=error_responses(401))
    async def list_models() -> ModelList:
        """The model, under each of its names."""
        return ModelList(object="list", data=[card(name) for name in service.settings.served_model_name])

    @routes.get("/v1/models/{model:path}", responses=error_responses(401, 404))
    async def retrieve_model(model: str) -> ModelCard:
        service.check_model(model)
        return card(model)

    return routes


# --------------------------------------------------------------------------------------------------------------- tokens
# ``/tokenize`` and ``/detokenize``, as vLLM has them.


class TokenizeRequest(ApiModel):
    """Either a text, or a conversation that the chat template turns into one."""

    unread: ClassVar[Unread] = {"add_generation_prompt": (True,), "continue_final_message": (False,)}
    telling: ClassVar[Mapping[str, Collection[Any]]] = {"prompt": ("",)}

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[Message] | None = None
    tools: ListOf[Tool] | None = None
    add_special_tokens: bool | None = None
    """For a prompt: whether it gets the tokenizer's own first token; by default it does."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def has_one_text(self) -> TokenizeRequest:
        if (self.prompt is None and self.messages is None) or (self.prompt and self.messages):
            raise ValueError("prompt is needed, or messages; give one of them, and not both")
        if self.messages is None and self.tools is not None:
            raise ValueError("tools is for messages; remove it")
        if self.messages is not None and self.add_special_tokens:
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
    """The routes that turn texts into token ids and back."""
    routes = APIRouter(tags=["tokens"], responses=error_responses(400, 401, 404, 408, 413, 415))
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
        """The prompt of the text or the conversation. Raises RequestError for one that the tokenizer cannot read."""
        if body.messages is not None:
            return await prompts.of_chat(body.messages, body.tools)
        return await prompts.of_text(body.prompt or "", body.add_special_tokens is not False)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Text:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        return Text(prompt=(await prompts.of_ids(body.tokens, "tokens")).text)

    return routes


# ---------------------------------------------------------------------------------------------------------- unsupported
# Routes of the OpenAI API that a language model cannot serve: refused with the reason, not as unknown paths.

TEXT_ALONE: Final = "the model here writes text"
"""The beginning of refusals of endpoints for other kinds of models."""
REASONS: Final = {
    "/v1/embeddings": f"{TEXT_ALONE} and has no embeddings: ask a server that runs an embedding model",
    "/v1/moderations": f"{TEXT_ALONE} and judges none: ask a server that runs a moderation model",
    "/v1/images/generations": f"{TEXT_ALONE}, and no images",
    "/v1/audio/speech": f"{TEXT_ALONE}, and no sound",
    "/v1/audio/transcriptions": f"{TEXT_ALONE} and reads no sound",
}
"""Paths that are refused, each with the reason."""


def unsupported_router() -> APIRouter:
    """The routes that refuse, left out of the OpenAPI schema."""
    routes = APIRouter()
    for path, reason in REASONS.items():
        routes.add_api_route(path, refusing(path, reason), methods=["POST"], include_in_schema=False)
    return routes


def refusing(path: str, reason: str) -> Callable[[], None]:
    """A route that refuses ``path`` with status 404 and the reason."""

    def refuse() -> None:
        raise ApiError(404, f"{path} is not served: {reason}", code="unsupported")

    return refuse
