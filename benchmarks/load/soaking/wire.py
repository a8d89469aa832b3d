"""HTTP/1.1 over a socket of our own, so that a client can misbehave at any byte."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import h11

Address = tuple[str, int]
NARROW: Final = 2048
"""Bytes that the socket of a slow reader holds; Linux doubles them."""


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One connection: requests go out as bytes, replies come in piece by piece."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._h11 = h11.Connection(h11.CLIENT)

    def request(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        """The bytes of a POST. ``headers`` may override those that are there in any case."""
        given = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
        parts = [h11.Request(method="POST", target=path, headers=list(given.items())), h11.Data(body)]
        return b"".join(self._h11.send(part) or b"" for part in [*parts, h11.EndOfMessage()])

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def reply(self) -> Reply:
        """The whole reply, after which the connection takes a further request, if the server keeps it open."""
        head = await self.head()
        body = b"".join([data async for data in self.data()])
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
        return Reply(head.status_code, {k.decode(): v.decode() for k, v in head.headers}, body)

    async def head(self) -> h11.Response:
        event = await self._next(65536)
        assert isinstance(event, h11.Response), event
        return event

    async def data(self, most: int = 65536) -> AsyncIterator[bytes]:
        """The reply's body, read from the socket in pieces of at most so many bytes."""
        while isinstance(event := await self._next(most), h11.Data):
            yield bytes(event.data)

    async def _next(self, most: int) -> Any:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(await self._reader.read(most))
        return event

    async def closed(self) -> None:
        """Return when the server has closed the connection."""
        while await self._reader.read(65536):
            pass

    def abort(self) -> None:
        """Drop the connection at once (RST where something is unread)."""
        self._writer.transport.abort()


@asynccontextmanager
async def connected(address: Address, *, narrow: bool = False) -> AsyncIterator[Connection]:
    """A connection until the block ends. A ``narrow`` one buffers next to nothing."""
    end = socket.socket()
    end.setblocking(False)
    if narrow:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW)
    try:
        await asyncio.get_running_loop().sock_connect(end, address)
        reader, writer = await asyncio.open_connection(sock=end, limit=256 if narrow else 65536)
    except BaseException:
        end.close()
        raise
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
