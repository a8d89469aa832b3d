"""Event streams: written no faster than they are read, and closed however they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from penstock.server.http.errors import EventStream


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


class Counted:
    """Events, counted as they are asked for, and whether somebody has cleaned up."""

    def __init__(self) -> None:
        self.asked = 0
        self.cleaned = self.closed = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                self.asked += 1
                yield b"data: {}\n\n"
        finally:
            self.cleaned = True

    def close(self) -> None:
        self.closed = True


async def nothing() -> Any:
    raise AssertionError("the stream itself does not listen")


def test_a_reader_that_does_not_read_is_not_written_for() -> None:
    """The next event is made when the one before it has been taken."""

    async def test() -> None:
        counted, taken = Counted(), asyncio.Semaphore(3)

        async def send(message: Any) -> None:
            await taken.acquire()

        response = EventStream(counted.events(), counted.close)
        sending = asyncio.ensure_future(response({"type": "http"}, nothing, send))
        while counted.asked < 3:
            await asyncio.sleep(0)
        for _ in range(20):  # a fourth would be asked for by now
            await asyncio.sleep(0)
        assert counted.asked == 3, "the head and two events were taken, the third is on offer"
        sending.cancel()
        await asyncio.wait([sending])
        assert counted.cleaned
        assert counted.closed

    run(test)


def test_a_stream_that_never_begins_is_closed_too() -> None:
    async def test() -> None:
        async def send(message: Any) -> None:
            raise OSError("the connection is gone")

        counted = Counted()
        with pytest.raises(OSError, match="gone"):
            await EventStream(counted.events(), counted.close)({"type": "http"}, nothing, send)
        assert counted.asked == 0
        assert counted.closed

    run(test)
