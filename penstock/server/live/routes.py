"""The routes of the live view: its frames, and the files of its page."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec
from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse

from penstock.engine.front import AsyncEngine
from penstock.engine.resolve import Resolved
from penstock.engine.stats import EngineStats, ReplicaStats
from penstock.hosts.placement import ranks_said
from penstock.server.http.errors import HEADERS, MEDIA_TYPE, busy, event
from penstock.server.live.state import BatchDone, BatchInFlight, LiveState, RequestTimeline, TreeView, View, Watcher
from penstock.trace import EMULATED

# --------------------------------------------------------------------------------------------------------------- frames
# The messages of the live view: ``Setup`` once, then a ``Frame`` whenever something has happened, both as JSON.

RUN: Final = secrets.token_hex(8)
"""Identifier of this run of the server: a page that stayed open over a restart forgets the run before."""


class StageSetup(msgspec.Struct, frozen=True):
    """A stage: its devices in the cluster, its host, and its layers from ``first`` up to, not including, ``last``.

    Both names are "" if they are unknown; ``host`` also for the stages on the engine's own host.
    """

    name: str
    host: str
    first: int
    last: int


class Setup(msgspec.Struct, frozen=True):
    """Everything that does not change while the server runs; ``run`` is another value after a restart.

    ``strategy`` is "autoregressive" where nothing is drafted; ``emulated`` says what is emulated, if anything.
    """

    run: str
    stages: list[StageSetup]
    strategy: str
    drafter: str | None
    emulated: str | None
    max_model_len: int


class PathNode(msgspec.Struct, frozen=True):
    """A committed token above or at the root. ``hit``: it had been drafted. ``text`` is None for other viewers."""

    node: int
    hit: bool
    text: str | None


class LiveNode(msgspec.Struct, frozen=True):
    """A live node, ``depth`` levels below the root. ``state`` is "drafted" (it has yet to enter), "in flight" or
    "answered" (the target's next token is known). The most probable node comes first, and parents before children.
    """

    node: int
    parent: int
    depth: int
    state: str
    text: str | None


class Tree(msgspec.Struct, frozen=True):
    """One request's draft tree: the last committed tokens, the root last, and at most 60 of the ``size`` nodes below.

    ``position`` is the root's in the text, prompt included.
    """

    request: int
    own: bool
    root: int
    position: int
    size: int
    path: list[PathNode]
    leaves: list[LiveNode]


class EngineRequest(msgspec.Struct, frozen=True):
    """A request on an engine; ``key`` is the same on whichever engine it is, and tells nothing of its id."""

    key: int
    own: bool


class EngineRow(msgspec.Struct, frozen=True):
    """One of several engines. ``busy`` are seconds that each of its stages has computed for since the start, also those
    before a restart. ``moved`` counts the requests that left it and went on elsewhere."""

    engine: int
    state: str
    reason: str | None
    waiting: int
    moved: int
    restarts: int
    busy: list[float]
    requests: list[EngineRequest]


class Frame(msgspec.Struct, frozen=True):
    """The engine at one moment, ``at`` (seconds, its clock; every time below is on it).

    ``stats`` counts since the start; a rate is the difference of two frames. ``flying`` are the batches in flight, the
    first in first; ``passed`` those that have come out since the viewer's last frame. ``tree`` is the viewer's own
    request's, else that of the one that has run longest, or None. ``own``: which of the ``requests`` are the viewer's.
    ``engines`` has a row for each of several, and none for one alone; batches, tree and requests are the first one's.
    """

    at: float
    stats: EngineStats
    flying: list[BatchInFlight]
    passed: list[BatchDone]
    tree: Tree | None
    requests: list[RequestTimeline]
    own: list[int]
    engines: list[EngineRow]


def setup_of(setup: Resolved) -> Setup:
    """The setup of an engine, for its viewers."""
    cluster, speculation = setup.cluster, setup.speculation
    names = [ranks_said(group) for group in setup.groups]
    if cluster is not None:
        names = [", ".join(stage.devices) for stage in cluster.stages]
    return Setup(
        run=RUN,
        stages=[
            StageSetup(name, host, first, last)
            for name, host, (first, last) in zip(names, setup.hosts, setup.layers, strict=True)
        ],
        strategy=speculation.strategy if speculation is not None else "autoregressive",
        drafter=" + ".join(speculation.methods) if speculation is not None else None,
        emulated=EMULATED if setup.emulated else None,
        max_model_len=setup.max_model_len,
    )


def rows_of(replicas: Sequence[ReplicaStats], request_id: str | None) -> list[EngineRow]:
    """A row for each of several engines. ``request_id`` is the viewer's own request; its points are named below it."""

    def request(name: str) -> EngineRequest:
        own = request_id is not None and (name == request_id or name.startswith(f"{request_id}/"))
        # Hashed with this run's identifier: a viewer can follow a request, and cannot learn its id.
        return EngineRequest(hash((RUN, name)) & 0xFFFFFFFF, own)

    if len(replicas) < 2:
        return []
    return [
        EngineRow(
            one.number,
            one.state,
            one.problem,
            one.stats.waiting if one.stats else 0,
            one.moved,
            one.restarts,
            one.stats.stage_busy_seconds if one.stats else [],
            [request(name) for name in one.requests],
        )
        for one in replicas
    ]


def frame_of(
    view: View,
    watcher: Watcher,
    stats: EngineStats,
    token_text: Callable[[int], str],
    now: float,
    newest: int,
    engines: list[EngineRow],
) -> Frame:
    """One viewer's frame. ``newest`` is the last batch that the viewer was told to have come out."""
    done = [batch for batch in view.done if batch.stream > newest]
    tree = tree_of(view, watcher, token_text)
    return Frame(now, stats, view.in_flight, done, tree, view.timelines, sorted(watcher.own), engines)


def tree_of(view: View, watcher: Watcher, token_text: Callable[[int], str]) -> Tree | None:
    """The tree of the viewer's own request, else of the oldest one, so that the view does not jump between requests."""
    candidates = (view.trees.keys() & watcher.own) or view.trees.keys()
    if not candidates:
        return None
    # The lowest number is the oldest request's.
    number = min(candidates)
    return shown(view.trees[number], token_text, own=number in watcher.own)


def shown(tree: TreeView, token_text: Callable[[int], str], own: bool) -> Tree:
    """A tree as a viewer may see it: with the tokens' texts for its owner, without any for others."""

    def text(token: int) -> str | None:
        return token_text(token) if own else None

    path = [PathNode(one.node, one.hit, text(one.token)) for one in tree.path]
    nodes = [LiveNode(one.node, one.parent, one.depth, one.state, text(one.token)) for one in tree.nodes]
    return Tree(tree.number, own, tree.root, tree.position, tree.size, path, nodes)


# ----------------------------------------------------------------------------------------------------------- page files
# The web page's files: read once, served with an entity tag, and under a policy that loads nothing else.

FOLDER: Final = Path(__file__).parent / "page"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS: Final = {
    "Cache-Control": "no-cache",  # stored, but checked each time: the files change with the package
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFile:
    """One file of the page, with its media type and its entity tag."""

    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        self.type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        self.tag = f'"{hashlib.sha256(self.body).hexdigest()[:16]}"'

    def response(self, request: Request) -> Response:
        headers = PAGE_HEADERS | {"ETag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.type, headers=headers)


def page_router() -> APIRouter:
    """Routes for ``/`` and ``/page/NAME``. They need no API key, as they hold nothing secret."""
    files = {path.name: PageFile(path) for path in FOLDER.iterdir() if path.is_file()}
    routes = APIRouter()

    @routes.get("/")
    def index(request: Request) -> Response:
        return files["index.html"].response(request)

    @routes.get("/page/{name}")
    def page(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404, f"the page has no file {name!r}")
        return files[name].response(request)

    return routes


# --------------------------------------------------------------------------------------------------------------- routes
# The live view: ``GET /`` is the web page, ``GET /live`` the engine at work as server-sent events.
#
# ``/live`` sends one event ``setup`` (``Setup``), then events ``frame`` (``Frame``), all as JSON: ten frames a second
# while something happens, else one every few seconds. A slow reader gets fewer frames, never old ones. ``?request=ID``
# names the viewer's own request, by the ``X-Request-Id`` with which it was sent: its tree comes with the tokens' texts.
# Texts of other requests are never sent here.

INTERVAL: Final = 0.1
"""Seconds between two frames while something happens. Shorter pauses cost each viewer more, longer ones show the tree
in jumps."""
KEEP_ALIVE: Final = 5.0
"""Seconds between two frames while nothing happens. Proxies close connections that are silent for longer, mostly after
a minute."""
MOST_WATCHERS: Final = 32
"""Most viewers at a time: each costs a frame every 0.1 s."""


def live_router(llm: AsyncEngine) -> APIRouter:
    """Routes for the page and its live view. The caller guards ``/live`` with the API key; the page needs none."""
    state = LiveState(llm.setup.stages)
    llm.observe(state)
    token_text = lru_cache(maxsize=4096)(lambda token: llm.get_tokenizer().decode([token], skip_special_tokens=False))
    routes = page_router()

    @routes.get("/live")
    async def live(request: str | None = Query(default=None, max_length=256)) -> StreamingResponse:
        if state.watchers >= MOST_WATCHERS:
            raise busy(f"{MOST_WATCHERS} viewers watch already, as many as may: try again later", "too_many_viewers")
        stream = events(llm, state, token_text, request)
        return StreamingResponse(stream, media_type=MEDIA_TYPE, headers=HEADERS)

    return routes


async def events(
    llm: AsyncEngine, state: LiveState, token_text: Callable[[int], str], request_id: str | None
) -> AsyncIterator[bytes]:
    """One viewer's stream, until the viewer leaves or the engine has ended."""
    yield event(setup_of(llm.setup), "setup")
    version, told_at, newest = -1, 0.0, -1
    told: list[EngineRow] = []
    with state.watch() as watcher:
        while True:
            if request_id is not None:
                state.claim(watcher, llm.numbers(request_id))
            now, stats, rows = time.monotonic(), llm.stats(), rows_of(llm.replicas(), request_id)
            news = state.version != version or rows != told
            if news or stats.ended is not None or now - told_at >= KEEP_ALIVE:
                view = state.view(now)
                yield event(frame_of(view, watcher, stats, token_text, now, newest, rows), "frame")
                version, told_at, told = view.version, now, rows
                newest = max([newest, *(batch.stream for batch in view.done)])
                if stats.ended is not None:
                    return
            await asyncio.sleep(INTERVAL)
