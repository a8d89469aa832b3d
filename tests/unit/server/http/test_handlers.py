"""Errors that a route raises, as replies and in the log."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from penstock.core import PipelineError
from penstock.server.http import middleware
from penstock.server.http.middleware import Record, Records


def reply_to(error: Exception) -> tuple[httpx.Response, Record]:
    """The reply of a route that raises. What leaves the application, uvicorn would log as its failure: it is raised."""
    app = FastAPI()
    middleware.install(app)
    ended: list[Record] = []
    app.add_middleware(Records, on_end=[ended.append])

    @app.get("/")
    async def fail() -> None:
        raise error

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get("/")

    return asyncio.run(ask()), ended[0]


def test_a_lost_engine_is_a_reply_and_no_fault_of_the_application() -> None:
    reply, record = reply_to(PipelineError("stage 1 was lost"))
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "stage 1 was lost"
    assert record.error == "engine_lost"


def test_a_fault_of_ours_reaches_the_log() -> None:
    with pytest.raises(ZeroDivisionError):
        reply_to(ZeroDivisionError())


LONG = "9" * 5001
AFTER_DIGITS = "is a number of 5,001 digits; it may have 4,300"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (f'{{"a": {LONG}}}', "a"),
        (f'{{"x": 1, "a": -{LONG}, "y": "{LONG}"}}', "a"),
        (f'{{"a": {{"b": [0, {{"c": {LONG}}}]}}}}', "a.b[1].c"),
        (f"[{LONG}]", "[0]"),
        (LONG, "the body"),
    ],
)
def test_a_number_of_thousands_of_digits_is_named_by_its_field(body: str, param: str) -> None:
    app = FastAPI()
    middleware.install(app)
    app.add_middleware(Records, on_end=[])

    @app.post("/")
    async def take(body: dict[str, Any]) -> None: ...

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/", content=body, headers={"Content-Type": "application/json"})

    reply = asyncio.run(ask())
    error = reply.json()["error"]
    named = None if param == "the body" else param
    assert (reply.status_code, error["param"], error["code"]) == (400, named, "invalid_json")
    assert error["message"] == f"{param} {AFTER_DIGITS}"
