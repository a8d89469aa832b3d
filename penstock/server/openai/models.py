"""``/v1/models``: the model, under each of its names."""

from __future__ import annotations

import time
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from penstock.server.http.errors import error_responses
from penstock.server.openai.service import Service
from penstock.text.chat import chat_sampling


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    chat_sampling: dict[str, float]
    """Default sampling parameters of chats: those that the checkpoint recommends, or else greedy."""


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


def model_router(service: Service) -> APIRouter:
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
