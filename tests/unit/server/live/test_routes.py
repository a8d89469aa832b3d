"""The live view's stream: what it says, to whom, and when it ends. And the page's files."""

from __future__ import annotations

import asyncio
import json
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from penstock.engine.loop import Observer
from penstock.engine.stats import EngineStats
from penstock.server.live import routes
from penstock.server.live.page_files import FOLDER
from penstock.server.live.routes import events, live_router, tree_of
from penstock.server.live.state import Picture, View, Watcher
from penstock.server.live.tree_view import Certain, Sketch, Twig

SECRET = "sesame"


def stats(ended: str | None = None) -> EngineStats:
    counts = dict.fromkeys((name for name in EngineStats.__dataclass_fields__ if name != "finished"), 0)
    lists: dict[str, Any] = {"stage_busy_seconds": [0.0, 0.0], "stage_heard_seconds_ago": [0.0, 0.0]}
    return EngineStats(**(counts | lists | {"last_step_seconds_ago": None, "ended": ended}))


class Engine:
    """As much of an AsyncLLM as the live view needs."""

    def __init__(self) -> None:
        self.setup: Any = SimpleNamespace(
            stages=2, layers=((0, 3), (3, 5)), cluster=None, speculation=None, max_model_len=64
        )
        self.observers: list[Observer] = []
        self.ended: str | None = None
        self.known: dict[str, list[int]] = {}

    def observe(self, observer: Observer) -> None:
        self.observers.append(observer)

    def stats(self) -> EngineStats:
        return stats(self.ended)

    def numbers(self, request_id: str) -> list[int]:
        return self.known.get(request_id, [])

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(decode=lambda ids, skip_special_tokens: SECRET)


def parsed(chunk: bytes) -> tuple[str, Any]:
    event, data = chunk.decode().strip().split("\n")
    return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def first(count: int, engine: Engine, picture: Picture) -> list[tuple[str, Any]]:
    stream = events(engine, picture, lambda token: SECRET, "mine")  # type: ignore[arg-type]
    return [parsed(await anext(stream)) for _ in range(count)]


def test_a_stream_begins_with_the_setup_and_a_frame() -> None:
    (kind, setup), (name, frame) = asyncio.run(first(2, Engine(), Picture(2)))
    assert (kind, name) == ("setup", "frame")
    assert setup["stages"] == [{"name": "", "first": 0, "last": 3}, {"name": "", "first": 3, "last": 5}]
    assert setup["strategy"] == "autoregressive"
    assert frame["tree"] is None
    assert frame["stats"]["ended"] is None


async def until_the_end(engine: Engine) -> list[tuple[str, Any]]:
    picture = Picture(2)
    found = []
    async for chunk in events(engine, picture, lambda token: SECRET, None):  # type: ignore[arg-type]
        found.append(parsed(chunk))
        engine.ended = "a stage was lost"
    assert picture.watchers == 0
    return found


def test_a_stream_ends_with_the_engine_and_says_why() -> None:
    *_, (name, frame) = asyncio.run(until_the_end(Engine()))
    assert (name, frame["stats"]["ended"]) == ("frame", "a stage was lost")


async def after_the_news(engine: Engine) -> dict[str, Any]:
    stream = events(engine, Picture(2), lambda token: SECRET, "mine")  # type: ignore[arg-type]
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


def sketch(number: int) -> Sketch:
    path = [Certain(node=1, token=77, hit=True), Certain(node=2, token=78, hit=False)]
    return Sketch(number, root=2, position=9, size=1, path=path, twigs=[Twig(3, 2, 1, 79, "drafted")])


def view(*numbers: int) -> View:
    return View(1, [], [], {number: sketch(number) for number in numbers}, [])


def test_texts_are_for_the_requests_owner_only() -> None:
    mine = tree_of(view(4, 5), Watcher(own={5}), lambda token: SECRET)
    assert mine is not None
    assert (mine.request, mine.own) == (5, True)
    assert [step.text for step in mine.path] == [SECRET, SECRET]
    others = tree_of(view(4, 5), Watcher(own={6}), lambda token: SECRET)
    assert others is not None
    assert (others.request, others.own) == (4, False)
    told = json.dumps(routes.msgspec.to_builtins(others))
    assert SECRET not in told
    assert not {"77", "78", "79"} & set(re.findall(r"\d+", told)), "token ids are as good as texts"
    assert [leaf.node for leaf in others.leaves] == [3]


def client(engine: Engine) -> TestClient:
    app = FastAPI()
    app.include_router(live_router(engine))  # type: ignore[arg-type]
    return TestClient(app)


def test_the_router_has_the_engine_watched() -> None:
    engine = Engine()
    client(engine)
    assert [type(observer) for observer in engine.observers] == [Picture]


def test_more_viewers_than_there_may_be_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MOST_WATCHERS", 0)
    reply = client(Engine()).get("/live")
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) > 0
    assert "0 viewers" in reply.json()["detail"]


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_files_are_sent_with_type_tag_and_policy(name: str) -> None:
    pages = client(Engine())
    reply = pages.get("/" if name == "index.html" else f"/page/{name}")
    assert reply.content == (FOLDER / name).read_bytes()
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert reply.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert not any(word in policy for word in ("unsafe", "http", "*"))
    again = pages.get(reply.url.path, headers={"If-None-Match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/page/live.py", "/page/..%2flive.py", "/page/../live.py", "/page/"])
def test_nothing_else_is_served(path: str) -> None:
    assert client(Engine()).get(path).status_code == 404


def test_the_page_names_no_other_origin_and_holds_no_script() -> None:
    for file in FOLDER.iterdir():
        text = file.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), file.name
    html = (FOLDER / "index.html").read_text()
    assert html.count("<script") == html.count('<script type="module" src="page/')
    assert not re.search(r"\s(style|on\w+)=", html)
