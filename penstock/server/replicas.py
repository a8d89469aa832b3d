"""Routes about the engines behind the server: ``/load``, and for several ``/replicas/N/drain`` and ``/restart``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from penstock.core import RequestError
from penstock.engine.front import AsyncEngine
from penstock.engine.replicas.replicas import Replicas
from penstock.engine.stats import ReplicaState, ReplicaStats
from penstock.server.http.errors import ApiError, error_responses
from penstock.server.http.middleware import needs_json


class ReplicaLoad(BaseModel):
    engine: int
    state: ReplicaState
    reason: str | None
    """Why it is not up, or what it recovers from."""
    running: int
    waiting: int
    kv_cache_usage: float
    """Share of the KV slots that is in use (1 is all)."""
    moved: int
    """Requests that left it and went on elsewhere."""
    restarts: int


class ServerLoad(BaseModel):
    server_load: int
    """Requests that run or wait, as vLLM names it."""
    engines: list[ReplicaLoad]


def load_of(one: ReplicaStats) -> ReplicaLoad:
    stats = one.stats
    return ReplicaLoad(
        engine=one.number,
        state=one.state,
        reason=one.problem,
        running=stats.running if stats else 0,
        waiting=stats.waiting if stats else 0,
        kv_cache_usage=stats.kv_used / stats.kv_slots if stats and stats.kv_slots else 0.0,
        moved=one.moved,
        restarts=one.restarts,
    )


def load_router(llm: AsyncEngine) -> APIRouter:
    routes = APIRouter(tags=["server"])

    @routes.get("/load", responses=error_responses(401))
    async def load() -> ServerLoad:
        """The requests under way, in all and on each engine: for whoever spreads requests over servers."""
        engines = [load_of(one) for one in llm.replicas()]
        return ServerLoad(server_load=sum(one.running + one.waiting for one in engines), engines=engines)

    return routes


def replica_router(llm: Replicas) -> APIRouter:
    routes = APIRouter(tags=["server"], dependencies=[Depends(needs_json)])
    errors = error_responses(401, 404, 409, 415, 503)

    @routes.post("/replicas/{number}/drain", responses=errors)
    async def drain(number: int) -> ReplicaLoad:
        """Have an engine take no more requests; those that it has go on elsewhere. It stays so until its restart."""
        return await done(llm, number, llm.drain)

    @routes.post("/replicas/{number}/restart", responses=errors)
    async def restart(number: int) -> ReplicaLoad:
        """Drain an engine, end it and make it again. The reply comes when it is up."""
        return await done(llm, number, llm.restart)

    return routes


async def done(llm: Replicas, number: int, deed: Callable[[int], Awaitable[None]]) -> ReplicaLoad:
    """Do something to a replica. Raises ApiError: 404 if there is none, 409 while it cannot be done."""
    count = len(llm.replicas())
    if not 0 <= number < count:
        raise ApiError(404, f"replica {number} is not there; there are 0 to {count - 1}", code="replica_not_found")
    try:
        await deed(number)
    except RequestError as error:
        raise ApiError(409, str(error), code="replica_needed") from error
    return load_of(llm.replicas()[number])
