"""The requests that a drain waits for."""

from __future__ import annotations

import asyncio

from penstock.server.http.serving import Gate


def test_a_drain_without_requests_does_not_wait() -> None:
    async def test() -> None:
        await Gate().drain(1000.0)

    asyncio.run(asyncio.wait_for(test(), 30))
