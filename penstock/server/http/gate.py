"""The requests under way, and their orderly end when the server is told to stop."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from penstock.server.http.errors import ApiError, busy

log = logging.getLogger("penstock.server")

GRACE_S: Final = 5.0
"""Seconds for the replies to be sent after their requests were ended."""


class Work(Protocol):
    """A request under way, for which a drain waits."""

    def fail(self, error: ApiError) -> None:
        """End the request early, with this error for its reply."""
        ...


class Gate:
    """The requests under way. It belongs to the event loop's thread; others reach ``hurry`` by call_soon_threadsafe."""

    def __init__(self) -> None:
        self.draining = False
        self._inside: set[Work] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._hurried = asyncio.Event()

    def enter(self, work: Work) -> None:
        self._inside.add(work)
        self._empty.clear()

    def leave(self, work: Work) -> None:
        self._inside.discard(work)
        if not self._inside:
            self._empty.set()

    def check_open(self) -> None:
        """Raise ApiError (503) once the server is being stopped."""
        if self.draining:
            raise stopping()

    def hurry(self) -> None:
        """Let ``drain`` wait no longer."""
        self._hurried.set()

    async def drain(self, seconds: float) -> None:
        """Let no request in, wait up to ``seconds`` for those inside, then end each of them with an error."""
        self.draining = True
        log.info("draining", extra={"fields": {"requests": len(self._inside), "seconds": seconds}})
        waits = [asyncio.ensure_future(event.wait()) for event in (self._empty, self._hurried)]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for work in list(self._inside):
            work.fail(stopping())
        # Only emptiness counts now: a second signal must not cut off the replies.
        await asyncio.wait(waits[:1], timeout=GRACE_S)
        for wait in waits:
            wait.cancel()


def stopping() -> ApiError:
    return busy("the server is shutting down", "shutting_down")
