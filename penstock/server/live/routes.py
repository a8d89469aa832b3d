"""The live view: ``GET /`` is the web page, ``GET /live`` the engine at work as server-sent events.

``/live`` sends one event ``setup`` (``Setup``), then events ``frame`` (``Frame``) as JSON: ten a second while something
happens, one every few seconds else. A reader that is slow gets fewer frames, never old ones. ``?request=ID`` names the
viewer's own request, by the ``X-Request-Id`` with which it was sent: its tree comes with the tokens' texts. The texts
of other requests never leave the server this way.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from penstock.engine.stats import EngineStats
from penstock.server.http.errors import busy
from penstock.server.http.sse import HEADERS, MEDIA_TYPE, event
from penstock.server.live.batches import Flying, Passed
from penstock.server.live.page_files import page_router
from penstock.server.live.state import Picture, View, Watcher
from penstock.server.live.timelines import Timeline
from penstock.server.live.tree_view import Sketch
from penstock.trace import EMULATED

if TYPE_CHECKING:
    from penstock.engine.async_llm import AsyncLLM
    from penstock.engine.options import Resolved

INTERVAL: Final = 0.1
"""Seconds between two frames while something happens."""
KEEP_ALIVE: Final = 5.0
"""Seconds between two frames while nothing does."""
MOST_WATCHERS: Final = 32
"""Viewers at a time: each costs a frame every 0.1 s."""
RUN: Final = secrets.token_hex(8)
"""Another one after a restart: a page that stayed open forgets what it knew of the server before."""


class StageSetup(msgspec.Struct, frozen=True):
    """A stage: where it runs, and its layers from ``first`` up to, not including, ``last``."""

    name: str
    first: int
    last: int


class Setup(msgspec.Struct, frozen=True):
    """What does not change while the server runs; ``run`` is another one after a restart.

    ``strategy`` is "autoregressive" where nothing is drafted; ``emulated`` says what is.
    """

    run: str
    stages: list[StageSetup]
    strategy: str
    drafter: str | None
    emulated: str | None
    max_model_len: int


class Step(msgspec.Struct, frozen=True):
    """A certain token above or at the tree's root. ``hit``: it had been drafted. ``text`` None: not the viewer's."""

    node: int
    hit: bool
    text: str | None


class Leaf(msgspec.Struct, frozen=True):
    """A live node, ``depth`` levels below the root. ``state``: "drafted" (has yet to enter), "in flight" or "answered"
    (the target's next token after it is known). The likeliest leaf comes first, and no leaf before its parent.
    """

    node: int
    parent: int
    depth: int
    state: str
    text: str | None


class Tree(msgspec.Struct, frozen=True):
    """One request's draft tree: the last certain tokens, the root last, and at most 60 of the ``size`` nodes below.

    ``position`` is the root's in the text, prompt included.
    """

    request: int
    own: bool
    root: int
    position: int
    size: int
    path: list[Step]
    leaves: list[Leaf]


class Frame(msgspec.Struct, frozen=True):
    """The engine at one moment, ``at`` (seconds, its clock; every time below is on it).

    ``stats`` counts since the start; a rate is the difference of two frames. ``flying`` are the batches on their way,
    the first in first; ``passed`` those that have come out since the viewer's last frame. ``tree`` is the viewer's own
    request's, else that of the one that has run longest, or None. ``own``: which of the ``requests`` are the viewer's.
    """

    at: float
    stats: EngineStats
    flying: list[Flying]
    passed: list[Passed]
    tree: Tree | None
    requests: list[Timeline]
    own: list[int]


def live_router(llm: AsyncLLM) -> APIRouter:
    """The page and its live view. The caller asks for the API key at ``/live``; the page itself needs none."""
    picture = Picture(llm.setup.stages)
    llm.observe(picture)
    text_of = lru_cache(maxsize=4096)(lambda token: llm.get_tokenizer().decode([token], skip_special_tokens=False))
    routes = page_router()

    @routes.get("/live")
    async def live(request: str | None = Query(default=None, max_length=256)) -> StreamingResponse:
        if picture.watchers >= MOST_WATCHERS:
            raise busy(f"{MOST_WATCHERS} viewers watch already, as many as may: try again later", "too_many_viewers")
        stream = events(llm, picture, text_of, request)
        return StreamingResponse(stream, media_type=MEDIA_TYPE, headers=HEADERS)

    return routes


async def events(
    llm: AsyncLLM, picture: Picture, text_of: Callable[[int], str], request_id: str | None
) -> AsyncIterator[bytes]:
    """The stream of one viewer, until it leaves or the engine has ended."""
    yield event(setup_of(llm.setup), "setup")
    version, told_at, newest = -1, 0.0, -1
    with picture.watch() as watcher:
        while True:
            if request_id is not None:
                picture.own(watcher, llm.numbers(request_id))
            now, stats = time.monotonic(), llm.stats()
            if picture.version != version or stats.ended is not None or now - told_at >= KEEP_ALIVE:
                view = picture.view(now)
                yield event(frame_of(view, watcher, stats, text_of, now, newest), "frame")
                version, told_at = view.version, now
                newest = max([newest, *(batch.stream for batch in view.passed)])
                if stats.ended is not None:
                    return
            await asyncio.sleep(INTERVAL)


def frame_of(
    view: View, watcher: Watcher, stats: EngineStats, text_of: Callable[[int], str], now: float, newest: int
) -> Frame:
    """One viewer's frame. ``newest`` is the last batch that it has been told to have passed."""
    passed = [batch for batch in view.passed if batch.stream > newest]
    own = sorted(watcher.own)
    return Frame(now, stats, view.flying, passed, tree_of(view, watcher, text_of), view.timelines, own)


def tree_of(view: View, watcher: Watcher, text_of: Callable[[int], str]) -> Tree | None:
    """Of the viewer's own request, else of the oldest one: the picture does not jump from one to another."""
    candidates = (view.sketches.keys() & watcher.own) or view.sketches.keys()
    if not candidates:
        return None
    number = min(candidates)
    return shown(view.sketches[number], text_of, own=number in watcher.own)


def shown(sketch: Sketch, text_of: Callable[[int], str], own: bool) -> Tree:
    """A tree for its owner's eyes, or, without a single token, for everybody's."""

    def text(token: int) -> str | None:
        return text_of(token) if own else None

    path = [Step(one.node, one.hit, text(one.token)) for one in sketch.path]
    leaves = [Leaf(one.node, one.parent, one.depth, one.state, text(one.token)) for one in sketch.twigs]
    return Tree(sketch.number, own, sketch.root, sketch.position, sketch.size, path, leaves)


def setup_of(setup: Resolved) -> Setup:
    cluster, speculation = setup.cluster, setup.speculation
    names = [", ".join(stage.devices) for stage in cluster.stages] if cluster is not None else [""] * setup.stages
    emulated = cluster is not None and cluster.emulated
    return Setup(
        run=RUN,
        stages=[StageSetup(name, first, last) for name, (first, last) in zip(names, setup.layers, strict=True)],
        strategy=speculation.strategy if speculation is not None else "autoregressive",
        drafter=speculation.method if speculation is not None else None,
        emulated=EMULATED if emulated else None,
        max_model_len=setup.max_model_len,
    )
