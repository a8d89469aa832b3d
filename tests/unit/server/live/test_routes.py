"""The live view's stream: what it says, to whom, and when it ends."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from penstock.engine.loop import Observer
from penstock.engine.stats import EngineStats, ReplicaState, ReplicaStats
from penstock.server.live import routes
from penstock.server.live.routes import EngineRequest, events, live_router, rows_of
from penstock.server.live.state import LiveState

SECRET = "sesame"


def stats(ended: str | None = None) -> EngineStats:
    counts = dict.fromkeys((name for name in EngineStats.__dataclass_fields__ if name != "finished"), 0)
    lists: dict[str, Any] = {
        "stage_busy_seconds": [0.0, 0.0],
        "stage_heard_seconds_ago": [0.0, 0.0],
        "stage_rank_bytes": [[], []],
    }
    return EngineStats(**(counts | lists | {"last_step_seconds_ago": None, "recovering": None, "ended": ended}))


class Engine:
    """The part of an AsyncLLM that the live view needs."""

    def __init__(self) -> None:
        self.setup: Any = SimpleNamespace(
            stages=2,
            layers=((0, 3), (3, 5)),
            hosts=("", "10.0.0.2"),
            groups=(("",), ("10.0.0.2", "10.0.0.3")),
            cluster=None,
            emulated=False,
            speculation=None,
            max_model_len=64,
        )
        self.observers: list[Observer] = []
        self.ended: str | None = None
        self.known: dict[str, list[int]] = {}

    def observe(self, observer: Observer) -> None:
        self.observers.append(observer)

    def stats(self) -> EngineStats:
        return stats(self.ended)

    def replicas(self) -> list[ReplicaStats]:
        return [ReplicaStats(0, ReplicaState.UP, self.ended, self.stats())]

    def numbers(self, request_id: str) -> list[int]:
        return self.known.get(request_id, [])

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(decode=lambda ids, skip_special_tokens: SECRET)


def parsed(chunk: bytes) -> tuple[str, Any]:
    event, data = chunk.decode().strip().split("\n")
    return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def first(count: int, engine: Engine, state: LiveState) -> list[tuple[str, Any]]:
    stream = events(engine, state, lambda token: SECRET, "mine")  # type: ignore[arg-type]
    return [parsed(await anext(stream)) for _ in range(count)]


def test_a_stream_begins_with_the_setup_and_a_frame() -> None:
    (kind, setup), (name, frame) = asyncio.run(first(2, Engine(), LiveState(2)))
    assert (kind, name) == ("setup", "frame")
    assert setup["stages"] == [
        {"name": "", "host": "", "first": 0, "last": 3},
        {"name": "2 ranks on 10.0.0.2 + 10.0.0.3", "host": "10.0.0.2", "first": 3, "last": 5},
    ]
    assert setup["strategy"] == "autoregressive"
    assert frame["tree"] is None
    assert frame["stats"]["ended"] is None


async def until_the_end(engine: Engine) -> list[tuple[str, Any]]:
    state = LiveState(2)
    found = []
    async for chunk in events(engine, state, lambda token: SECRET, None):  # type: ignore[arg-type]
        found.append(parsed(chunk))
        engine.ended = "a stage was lost"
    assert state.watchers == 0
    return found


def test_a_stream_ends_with_the_engine_and_says_why() -> None:
    *_, (name, frame) = asyncio.run(until_the_end(Engine()))
    assert (name, frame["stats"]["ended"]) == ("frame", "a stage was lost")


async def after_the_news(engine: Engine) -> dict[str, Any]:
    stream = events(engine, LiveState(2), lambda token: SECRET, "mine")  # type: ignore[arg-type]
    for _ in range(2):
        await anext(stream)
    engine.known["mine"] = [4]
    _, frame = parsed(await anext(stream))
    assert isinstance(frame, dict)
    return frame


def test_a_viewer_is_told_which_requests_are_its_own_though_nothing_else_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "KEEP_ALIVE", math.inf)
    assert asyncio.run(asyncio.wait_for(after_the_news(Engine()), 60))["own"] == [4]


def client(engine: Engine) -> TestClient:
    app = FastAPI()
    app.include_router(live_router(engine))  # type: ignore[arg-type]
    return TestClient(app)


def test_the_router_has_the_engine_watched() -> None:
    engine = Engine()
    client(engine)
    assert [type(observer) for observer in engine.observers] == [LiveState]


def test_more_viewers_than_there_may_be_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MOST_WATCHERS", 0)
    reply = client(Engine()).get("/live")
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) > 0
    assert "0 viewers" in reply.json()["detail"]


def test_several_engines_are_rows_that_name_no_request() -> None:
    replicas = [
        ReplicaStats(0, ReplicaState.DRAINING, None, stats(None), moved=1),
        ReplicaStats(1, ReplicaState.DOWN, "a stage was lost", None, requests=["mine/1", "other", "mine"]),
    ]
    drained, down = rows_of(replicas, "mine")
    assert (drained.state, drained.moved, drained.requests) == ("draining", 1, [])
    assert (down.reason, down.busy, [one.own for one in down.requests]) == ("a stage was lost", [], [True, False, True])
    assert len({one.key for one in down.requests}) == 3
    moved = rows_of([replace(replicas[0], requests=["other"]), replicas[1]], None)[0].requests
    assert moved == [EngineRequest(down.requests[1].key, own=False)]
    assert rows_of(replicas[:1], "mine") == []
