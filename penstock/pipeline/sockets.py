"""A process's sockets, of the kind that an address asks for: ``ipc://PATH`` on this host, ``tcp://HOST:PORT`` else."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import zmq

from penstock.pipeline.inbox import Inbox, Outbox
from penstock.pipeline.local import SCHEME, LocalInbox, LocalOutbox
from penstock.pipeline.remote import RemoteInbox, RemoteOutbox


class Sockets:
    """All that one process opens. ``close`` closes its outboxes; inboxes are closed by who opened them, before."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] | None = None
        self._outboxes: list[Outbox] = []

    def inbox(self, address: str) -> Inbox:
        """Listen at an address: a path that does not exist, or a tcp port (* lets the system choose)."""
        if address.startswith(SCHEME):
            return LocalInbox(address.removeprefix(SCHEME))
        return RemoteInbox(self._zeromq(), address)

    def connect(self, address: str, session: str) -> Outbox:
        """An outbox for somebody's inbox, by its ``address``, which admits those of the session."""
        outbox: Outbox
        if address.startswith(SCHEME):
            outbox = LocalOutbox(address.removeprefix(SCHEME), session)
        else:
            outbox = RemoteOutbox(self._zeromq(), address)
        self._outboxes.append(outbox)
        return outbox

    def _zeromq(self) -> zmq.Context[Any]:
        if self._context is None:
            self._context = zmq.Context()
        return self._context

    def close(self, linger: float = 0.0) -> None:
        """Give what is still on its way so many seconds to leave, then close. Safe to call twice."""
        for outbox in self._outboxes:
            outbox.close(linger)
        self._outboxes.clear()
        if self._context is not None:
            self._context.destroy(linger=round(1000 * linger))

    def __enter__(self) -> Sockets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
