"""The application: its routes about the server itself, and the pages about the API."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

from fastapi import APIRouter, Depends, FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from jinja2 import Environment
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel

import penstock
from penstock.core import PenstockError, RequestError
from penstock.engine.front import AsyncEngine
from penstock.engine.replicas.replicas import Replicas
from penstock.engine.stats import EngineStats, ReplicaState, ReplicaStats
from penstock.server.http import middleware
from penstock.server.http.errors import ApiError, error_responses
from penstock.server.http.middleware import Auth, BodyLimits, Records, Sites, Targets, log_request, needs_json
from penstock.server.http.serving import Attendance, Gate
from penstock.server.live.routes import live_router
from penstock.server.metrics import ServerMetrics
from penstock.server.openai.chat import chat_router
from penstock.server.openai.generation import Service
from penstock.server.openai.other import model_router, token_router, unsupported_router
from penstock.server.openai.protocol import REASONS, WARNING
from penstock.server.openai.reply import completion_router
from penstock.server.openai.responses_writer import responses_router
from penstock.server.settings import Listening, ServerSettings

# ------------------------------------------------------------------------------------------------------------- replicas
# Routes about the engines behind the server: ``/load``, and for several ``/replicas/N/drain`` and ``/restart``.


class ReplicaLoad(BaseModel):
    engine: int
    state: ReplicaState
    reason: str | None
    """Why it is not up, or what it recovers from."""
    running: int
    waiting: int
    kv_cache_usage: float
    """Share, 0 to 1, of the KV slots that is in use."""
    moved: int
    """Requests that left it and went on elsewhere."""
    restarts: int


class ServerLoad(BaseModel):
    server_load: int
    """Requests that run or wait, as vLLM names it."""
    engines: list[ReplicaLoad]


def load_of(one: ReplicaStats) -> ReplicaLoad:
    """An engine's state and load, as ``/load`` reports them."""
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


# ---------------------------------------------------------------------------------------------------------------- about
# Routes about the server itself: ``/health``, ``/metrics``, ``/version`` and ``/rebalance``.


class StageHealth(BaseModel):
    stage: int
    heard_seconds_ago: float


class EngineHealth(BaseModel):
    """One of several engines."""

    engine: int
    state: ReplicaState
    reason: str | None
    stages: list[StageHealth]


class Health(BaseModel):
    """``ok``: a token was generated just now, or can be. ``recovering``: what was lost is being replaced, and requests
    wait meanwhile. ``idle``: the weights are freed until a request comes. ``draining``: the server is being stopped.
    Of several engines, ``stages`` and ``last_step_seconds_ago`` are those of all."""

    status: Literal["ok", "recovering", "idle", "draining", "unavailable"]
    reason: str | None
    stages: list[StageHealth]
    last_step_seconds_ago: float | None
    engines: list[EngineHealth]


class Rebalanced(BaseModel):
    moving: bool


class Version(BaseModel):
    version: str


def about_router(llm: AsyncEngine, gate: Gate, registry: CollectorRegistry) -> APIRouter:
    routes = APIRouter(tags=["server"])

    @routes.get("/health", response_model=Health, responses={503: {"model": Health}})
    async def health() -> Response:
        """200 if an engine can generate a token end to end, replaces a lost stage, or is idle."""
        found = await health_of(llm, gate)
        return JSONResponse(found.model_dump(), 200 if found.status in ("ok", "recovering", "idle") else 503)

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


async def health_of(llm: AsyncEngine, gate: Gate) -> Health:
    """The server's health. A check waits for a token, unless the engine recovers or rests."""
    status: Literal["ok", "recovering", "idle", "draining", "unavailable"] = "ok"
    reason = None
    try:
        await llm.check_health()
    except PenstockError as error:
        status, reason = "unavailable", str(error)
    replicas, stats = llm.replicas(), llm.stats()
    if stats.recovering is not None:
        status, reason = "recovering", stats.recovering
    elif stats.resting:
        status, reason = "idle", "the weights are freed until a request comes"
    if gate.draining:
        status, reason = "draining", "the server is shutting down"
    engines = [engine_health(one) for one in replicas]
    return Health(
        status=status,
        reason=reason,
        stages=[stage for one in engines for stage in one.stages],
        last_step_seconds_ago=stats.last_step_seconds_ago,
        engines=engines,
    )


def engine_health(one: ReplicaStats) -> EngineHealth:
    """One engine's state, and its stages."""
    return EngineHealth(engine=one.number, state=one.state, reason=one.problem, stages=stages_of(one.stats))


def stages_of(stats: EngineStats | None) -> list[StageHealth]:
    """When each stage was last heard of; none while the weights are freed."""
    heard = [] if stats is None or stats.resting else stats.stage_heard_seconds_ago
    return [StageHealth(stage=number, heard_seconds_ago=seconds) for number, seconds in enumerate(heard)]


# ------------------------------------------------------------------------------------------------------------- api page
# ``/docs``: the routes and their fields, from the application's own OpenAPI schema, as one page that loads nothing.

STYLE: Final = """
:root { color-scheme: light dark; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
h2 { margin-top: 2rem; border-top: 1px solid #8886; padding-top: 1rem; font-size: 1.1rem; }
code { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8884; }
"""
"""The page's style, within the page."""
POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page's Content-Security-Policy: nothing is loaded, and this style alone applies, known by its hash."""
PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}: the API</title><style>{{ style }}</style>
<h1>{{ title }} {{ version }}</h1>
<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>
{% for route in routes %}<h2><code>{{ route.method }} {{ route.path }}</code></h2>
<p>{{ route.words }}</p>
{% if route.fields %}<table><tr><th>field<th>type<th></tr>
{% for field in route.fields %}<tr><td><code>{{ field.name }}</code><td>{{ field.kind }}
<td>{{ "required. " if field.required }}{{ field.words }}</tr>
{% endfor %}</table>{% endif %}
{% endfor %}</html>
"""
"""The page's Jinja template."""


@dataclass(frozen=True)
class Field:
    """A field of a route's body, for the page."""

    name: str
    kind: str
    required: bool
    words: str


@dataclass(frozen=True)
class Route:
    """A route with the fields of its body, for the page."""

    method: str
    path: str
    words: str
    fields: list[Field]


def api_page_router(app: FastAPI) -> APIRouter:
    routes = APIRouter()

    @cache
    def page() -> str:
        environment = Environment(autoescape=True, trim_blocks=True)
        found = list(routes_of(app.openapi()))
        return environment.from_string(PAGE).render(title=app.title, version=app.version, style=STYLE, routes=found)

    @routes.get("/docs")
    def docs() -> Response:
        return Response(page(), media_type="text/html", headers={"Content-Security-Policy": POLICY})

    return routes


def routes_of(openapi: Mapping[str, Any]) -> Iterator[Route]:
    """The routes of an OpenAPI schema."""
    schemas = openapi.get("components", {}).get("schemas", {})
    for path, methods in openapi["paths"].items():
        for method, told in methods.items():
            words = told.get("description") or told.get("summary", "")
            yield Route(method.upper(), path, words, list(fields_of(told, schemas)))


def fields_of(route: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[Field]:
    """The fields of the route's body, if it takes one."""
    content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = schemas.get(content.get("schema", {}).get("$ref", "").rpartition("/")[2], {})
    required = schema.get("required", ())
    for name, one in schema.get("properties", {}).items():
        yield Field(name, kind_of(one), name in required, one.get("description", ""))


def kind_of(schema: Mapping[str, Any]) -> str:
    """A schema's type in words, without null: every field that is not required may be null."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for alternatives in ("anyOf", "oneOf"):
        if alternatives in schema:
            kinds = (kind_of(one) for one in schema[alternatives] if one.get("type") != "null")
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        return " or ".join(f'"{value}"' for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {kind_of(schema.get('items', {}))}"
    return str(schema.get("type", "anything"))


# ------------------------------------------------------------------------------------------------------------------ app
# ``make_app``: an engine as an ASGI application, for ``penstock serve``, for tests, and to embed in other services.


def make_app(llm: AsyncEngine, settings: ServerSettings, listening: Listening | None = None) -> FastAPI:
    """The application over ``llm``, which stays the caller's to close. ``app.state.gate`` is its ``Gate``.

    It answers to the names that fit the address on which it is ``listening``; to any name without one. Call it on the
    event loop's thread. FastAPI's own documentation pages are left out, because they load scripts from elsewhere.
    """
    app = FastAPI(title="Penstock", version=penstock.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.gate = gate = Gate()
    metrics = ServerMetrics(llm, settings.served_model_name[0])
    service = Service(llm, settings, gate, metrics.generated)
    middleware.install(app, REASONS)
    for routes in (chat_router, completion_router, responses_router, token_router, model_router):
        app.include_router(routes(service))
    app.include_router(about_router(llm, gate, metrics.registry))
    app.include_router(load_router(llm))
    if isinstance(llm, Replicas):
        app.include_router(replica_router(llm))
    app.include_router(unsupported_router())
    app.include_router(api_page_router(app), include_in_schema=False)
    if settings.web:
        app.include_router(live_router(llm), include_in_schema=False)
    add_middleware(app, settings, listening, metrics)
    return app


def add_middleware(app: FastAPI, settings: ServerSettings, listening: Listening | None, metrics: ServerMetrics) -> None:
    """Add the middleware from the inside out: the one added last sees a request first."""
    gate, seconds = app.state.gate, settings.request_timeout
    # Attendance is next to the application, behind the limits on bodies: it may only cancel what has been let in.
    # Records is around all, so that refusals are logged, too.
    app.add_middleware(Attendance, gate=gate, seconds=seconds, has_keys=bool(settings.api_keys))
    app.add_middleware(BodyLimits, most=settings.max_body_size, seconds=settings.body_timeout)
    if settings.api_keys:
        app.add_middleware(Auth, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # those that a preflight asks for: clients send their own (x-stainless-...)
            expose_headers=["X-Request-Id", "Retry-After", WARNING],
        )
    app.add_middleware(Sites, listening=listening, origins=settings.allowed_origins)
    app.add_middleware(Targets)
    app.add_middleware(Records, on_end=[log_request, metrics.responded])
