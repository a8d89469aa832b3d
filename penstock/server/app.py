"""``make_app``: an engine as an ASGI application, for ``penstock serve``, for tests, and to embed in other services."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import penstock
from penstock.engine.async_llm import AsyncLLM
from penstock.server.about import about_router
from penstock.server.api_page import api_page_router
from penstock.server.http import handlers
from penstock.server.http.attendance import Attendance
from penstock.server.http.auth import Auth
from penstock.server.http.bodies import BodyLimits
from penstock.server.http.gate import Gate
from penstock.server.http.listen import Listening
from penstock.server.http.logs import log_request
from penstock.server.http.records import Records
from penstock.server.http.sites import Sites
from penstock.server.http.targets import Targets
from penstock.server.live.routes import live_router
from penstock.server.metrics import ServerMetrics
from penstock.server.openai.chat import chat_router
from penstock.server.openai.completions import completion_router
from penstock.server.openai.lenience import REASONS
from penstock.server.openai.models import model_router
from penstock.server.openai.protocol import WARNING
from penstock.server.openai.responses.routes import responses_router
from penstock.server.openai.service import Service
from penstock.server.openai.tokens import token_router
from penstock.server.openai.unsupported import unsupported_router
from penstock.server.settings import ServerSettings


def make_app(llm: AsyncLLM, settings: ServerSettings, listening: Listening | None = None) -> FastAPI:
    """The application over ``llm``, which stays the caller's to close. ``app.state.gate`` is its ``Gate``.

    It answers to the names that fit the address on which it is ``listening``; to any name without one. Call it on the
    event loop's thread. FastAPI's own documentation pages are left out, because they load scripts from elsewhere.
    """
    app = FastAPI(title="Penstock", version=penstock.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.gate = gate = Gate()
    metrics = ServerMetrics(llm, settings.served_model_name[0])
    service = Service(llm, settings, gate, metrics.generated)
    handlers.install(app, REASONS)
    for routes in (chat_router, completion_router, responses_router, token_router, model_router):
        app.include_router(routes(service))
    app.include_router(about_router(llm, gate, metrics.registry))
    app.include_router(unsupported_router())
    app.include_router(api_page_router(app), include_in_schema=False)
    if settings.web:
        app.include_router(live_router(llm), include_in_schema=False)
    add_middleware(app, settings, listening, metrics)
    return app


def add_middleware(app: FastAPI, settings: ServerSettings, listening: Listening | None, metrics: ServerMetrics) -> None:
    """Add the middleware from the inside out: the one added last sees a request first."""
    gate, seconds = app.state.gate, settings.request_timeout
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
