"""``/docs``, and routes that are refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from penstock.server.app import api_page_router, kind_of
from penstock.server.http import middleware
from penstock.server.http.middleware import Records
from penstock.server.openai.other import REASONS, unsupported_router
from penstock.server.openai.protocol import ChatCompletionRequest


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI(title="Penstock & co", version="1", docs_url=None)
    middleware.install(app)

    @app.post("/v1/chat/completions")
    def chat(body: ChatCompletionRequest) -> None:
        """Answer a conversation."""

    app.include_router(unsupported_router())
    app.include_router(api_page_router(app), include_in_schema=False)
    app.add_middleware(Records, on_end=[])
    return TestClient(app)


def test_the_page_of_the_api_tells_routes_and_fields_and_loads_nothing(client: TestClient) -> None:
    reply = client.get("/docs")
    assert reply.status_code == 200
    assert "Penstock &amp; co" in reply.text
    for said in ("POST /v1/chat/completions", "Answer a conversation.", "<code>temperature</code><td>number"):
        assert said in reply.text
    assert "<code>messages</code><td>list of Message\n<td>required." in reply.text
    assert "OpenAI&#39;s newer name of max_tokens." in reply.text
    assert [word for word in ("src=", "<script", "http://", "https://") if word in reply.text] == []
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "/v1/embeddings" not in reply.text


@pytest.mark.parametrize("path", REASONS)
def test_what_a_language_model_cannot_do_is_refused_with_the_reason(client: TestClient, path: str) -> None:
    reply = client.post(path, json={"model": "demo", "input": "a"})
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "unsupported"
    assert reply.json()["error"]["message"].startswith(f"{path} is not served: the model here writes text")


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "integer"}, "integer"),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "number"),
        ({"anyOf": [{"type": "string"}, {"items": {"$ref": "#/x/Part"}, "type": "array"}]}, "string or list of Part"),
        ({"enum": ["none", "auto"]}, '"none" or "auto"'),
        ({"const": "function"}, '"function"'),
        ({}, "anything"),
    ],
)
def test_types_in_words(schema: dict[str, Any], kind: str) -> None:
    assert kind_of(schema) == kind
