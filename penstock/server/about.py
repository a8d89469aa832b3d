"""What there is to know of a server: ``/v1/models``, ``/health``, ``/metrics``, ``/version``."""

from __future__ import annotations

import time
from typing import Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel

import penstock
from penstock.core import PenstockError
from penstock.server.openai.protocol import error_responses
from penstock.server.openai.service import Service


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class StageHealth(BaseModel):
    stage: int
    heard_seconds_ago: float


class Health(BaseModel):
    """``ok``: a token was generated just now, or can be. ``draining``: the server is being stopped."""

    status: Literal["ok", "draining", "unavailable"]
    reason: str | None
    stages: list[StageHealth]
    last_step_seconds_ago: float | None


class Version(BaseModel):
    version: str


def about_router(service: Service) -> APIRouter:
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
        )

    @routes.get("/v1/models", responses=error_responses(401))
    async def list_models() -> ModelList:
        """The model, under each of its names."""
        return ModelList(object="list", data=[card(name) for name in service.settings.served_model_name])

    @routes.get("/v1/models/{model:path}", responses=error_responses(401, 404))
    async def retrieve_model(model: str) -> ModelCard:
        service.check_model(model)
        return card(model)

    @routes.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> Response:
        """200 only if a token can be generated end to end."""
        found = await health_of(service)
        return JSONResponse(found.model_dump(), 200 if found.status == "ok" else 503)

    @routes.get("/metrics", response_class=Response, responses={200: METRICS, **error_responses(401)})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/version", responses=error_responses(401))
    async def version() -> Version:
        return Version(version=penstock.__version__)

    return routes


METRICS = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}


async def health_of(service: Service) -> Health:
    status: Literal["ok", "draining", "unavailable"] = "ok"
    reason = None
    try:
        await service.llm.check_health()
    except PenstockError as error:
        status, reason = "unavailable", str(error)
    if service.gate.draining:
        status, reason = "draining", "the server is shutting down"
    stats = service.llm.stats()
    stages = [
        StageHealth(stage=number, heard_seconds_ago=seconds)
        for number, seconds in enumerate(stats.stage_heard_seconds_ago)
    ]
    return Health(status=status, reason=reason, stages=stages, last_step_seconds_ago=stats.last_step_seconds_ago)
