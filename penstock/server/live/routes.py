"""The live view: ``GET /`` is the web page, ``GET /live`` the engine at work as server-sent events.

``/live`` sends one event ``setup`` (``Setup``), then events ``frame`` (``Frame``), all as JSON: ten frames a second
while something happens, else one every few seconds. A slow reader gets fewer frames, never old ones. ``?request=ID``
names the viewer's own request, by the ``X-Request-Id`` with which it was sent: its tree comes with the tokens' texts.
Texts of other requests are never sent here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from typing import Final

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from penstock.engine.async_llm import AsyncLLM
from penstock.server.http.errors import busy
from penstock.server.http.sse import HEADERS, MEDIA_TYPE, event
from penstock.server.live.frames import frame_of, setup_of
from penstock.server.live.page_files import page_router
from penstock.server.live.state import LiveState

INTERVAL: Final = 0.1
"""Seconds between two frames while something happens."""
KEEP_ALIVE: Final = 5.0
"""Seconds between two frames while nothing happens."""
MOST_WATCHERS: Final = 32
"""Most viewers at a time: each costs a frame every 0.1 s."""


def live_router(llm: AsyncLLM) -> APIRouter:
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
    llm: AsyncLLM, state: LiveState, token_text: Callable[[int], str], request_id: str | None
) -> AsyncIterator[bytes]:
    """One viewer's stream, until the viewer leaves or the engine has ended."""
    yield event(setup_of(llm.setup), "setup")
    version, told_at, newest = -1, 0.0, -1
    with state.watch() as watcher:
        while True:
            if request_id is not None:
                state.claim(watcher, llm.numbers(request_id))
            now, stats = time.monotonic(), llm.stats()
            if state.version != version or stats.ended is not None or now - told_at >= KEEP_ALIVE:
                view = state.view(now)
                yield event(frame_of(view, watcher, stats, token_text, now, newest), "frame")
                version, told_at = view.version, now
                newest = max([newest, *(batch.stream for batch in view.done)])
                if stats.ended is not None:
                    return
            await asyncio.sleep(INTERVAL)
