"""Routes about the server itself: ``/health``, ``/metrics``, ``/version`` and ``/rebalance``."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel

import penstock
from penstock.core import PenstockError
from penstock.engine.async_llm import AsyncLLM
from penstock.server.http.errors import error_responses
from penstock.server.http.gate import Gate
from penstock.server.http.sites import needs_json


class StageHealth(BaseModel):
    stage: int
    heard_seconds_ago: float


class Health(BaseModel):
    """``ok``: a token was generated just now, or can be. ``recovering``: what was lost is being replaced, and requests
    wait meanwhile. ``draining``: the server is being stopped."""

    status: Literal["ok", "recovering", "draining", "unavailable"]
    reason: str | None
    stages: list[StageHealth]
    last_step_seconds_ago: float | None


class Rebalanced(BaseModel):
    moving: bool


class Version(BaseModel):
    version: str


def about_router(llm: AsyncLLM, gate: Gate, registry: CollectorRegistry) -> APIRouter:
    routes = APIRouter(tags=["server"])

    @routes.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> Response:
        """200 if a token can be generated end to end, and while a lost stage is being replaced."""
        found = await health_of(llm, gate)
        return JSONResponse(found.model_dump(), 200 if found.status in ("ok", "recovering") else 503)

    @routes.get("/metrics", response_class=Response, responses={200: METRICS, **error_responses(401)})
    async def metrics() -> Response:
        """The server's metrics in Prometheus' text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/version", responses=error_responses(401))
    async def version() -> Version:
        return Version(version=penstock.__version__)

    @routes.post("/rebalance", responses=error_responses(401, 415, 503), dependencies=[Depends(needs_json)])
    async def rebalance() -> Rebalanced:
        """Have stages that were moved from a lost host move back to it now, if it is back: requests pause meanwhile."""
        return Rebalanced(moving=await llm.rebalance())

    return routes


METRICS = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}


async def health_of(llm: AsyncLLM, gate: Gate) -> Health:
    status: Literal["ok", "recovering", "draining", "unavailable"] = "ok"
    reason = None
    try:
        await llm.check_health()
    except PenstockError as error:
        status, reason = "unavailable", str(error)
    stats = llm.stats()
    if stats.recovering is not None:
        status, reason = "recovering", stats.recovering
    if gate.draining:
        status, reason = "draining", "the server is shutting down"
    stages = [
        StageHealth(stage=number, heard_seconds_ago=seconds)
        for number, seconds in enumerate(stats.stage_heard_seconds_ago)
    ]
    return Health(status=status, reason=reason, stages=stages, last_step_seconds_ago=stats.last_step_seconds_ago)
