"""HEAD, targets in their absolute form, and preflights, as clients and proxies send them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from penstock.server.app import add_middleware
from penstock.server.http import middleware
from penstock.server.http.middleware import ENDLESS, Targets
from penstock.server.http.serving import Gate
from penstock.server.settings import ServerSettings


def application() -> FastAPI:
    app = FastAPI()
    middleware.install(app)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get(ENDLESS)
    def live() -> None: ...

    @app.post("/v1/chat/completions")
    def chat() -> None: ...

    @app.get("/fault")
    def fault() -> None:
        raise KeyError("x")

    return app


@pytest.fixture
def client() -> Iterator[TestClient]:
    app = application()
    app.state.gate = Gate()
    add_middleware(app, ServerSettings(allowed_origins=("https://a.example",)), None, NoMetrics())  # type: ignore[arg-type]
    with TestClient(app, raise_server_exceptions=False) as found:
        yield found


class NoMetrics:
    def responded(self, record: Any) -> None: ...


def test_head_is_get_without_the_body(client: TestClient) -> None:
    asked, got = client.head("/health"), client.get("/health")
    assert (asked.status_code, asked.content) == (200, b"")
    assert asked.headers["content-length"] == got.headers["content-length"]
    assert client.head("/nothing").status_code == 404
    for path in (ENDLESS, "/v1/chat/completions"):
        assert client.head(path).status_code == 405


@pytest.mark.parametrize(
    ("target", "root", "path"),
    [
        ("http://host:8000/health", "", "/health"),
        ("HTTP://host/health", "", "/health"),
        ("https://host", "", "/"),
        ("/llmhttp://host/health", "/llm", "/llm/health"),
        ("/health", "", "/health"),
        ("http://[/health", "", "/health"),
        ("http://[::1]:x]y/health", "", "/health"),
        ("http://\u2100/health", "", "/health"),
        ("http:///health", "", "/health"),
        ("/http://host/health", "", "/http://host/health"),
    ],
)
def test_a_target_with_its_host_is_the_path(target: str, root: str, path: str) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    scope = {"type": "http", "method": "GET", "path": target, "raw_path": target.encode(), "root_path": root}
    asyncio.run(Targets(app)(scope, None, None))  # type: ignore[arg-type]
    assert (seen[0]["path"], seen[0]["raw_path"]) == (path, path.encode())


def test_a_preflight_is_answered_whatever_headers_are_asked_for(client: TestClient) -> None:
    wanted = "authorization, content-type, user-agent, x-stainless-arch, x-stainless-retry-count"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": wanted}
    reply = client.options("/v1/chat/completions", headers={"Origin": "https://a.example", **asked})
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-headers"] == wanted
    other = client.options("/v1/chat/completions", headers={"Origin": "https://b.example", **asked})
    assert "access-control-allow-origin" not in other.headers


def test_a_fault_says_that_the_connection_ends(client: TestClient) -> None:
    """uvicorn closes it behind a reply to an exception."""
    reply = client.get("/fault")
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert reply.headers["connection"] == "close"
