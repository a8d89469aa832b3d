"""The inboxes and outboxes of one process. Without certificates none of them reaches beyond this host."""

from __future__ import annotations

import ssl
from types import TracebackType

from penstock.core import ConfigError
from penstock.transport.addresses import Place, place_of
from penstock.transport.framing import MAX_FRAME_BYTES
from penstock.transport.inbox import Inbox
from penstock.transport.outbox import Outbox
from penstock.transport.security import LinkSecurity


class Sockets:
    """Opens inboxes and outboxes. ``close`` closes the outboxes; who opened an inbox closes it before.

    With ``security`` every tcp connection uses TLS. Without it, ``private_network`` permits plain connections to other
    hosts. Raises ConfigError if the files of ``security`` cannot be used.
    """

    def __init__(self, security: LinkSecurity | None = None, private_network: bool = False) -> None:
        self._listening = None if security is None else security.for_listening()
        self._connecting = None if security is None else security.for_connecting()
        self._private_network = private_network
        self._outboxes: list[Outbox] = []

    def inbox(self, address: str, most_frame: int = MAX_FRAME_BYTES) -> Inbox:
        """Listen at an address: a path that does not exist, or a tcp port (* lets the system choose).

        Frames may have ``most_frame`` bytes. Raises ConfigError for an address that other hosts can reach if there are
        no certificates, and OSError if it is taken.
        """
        place = self._allowed(address)
        return Inbox(place, context_for(place, self._listening), most_frame)

    def connect(self, address: str, session: str) -> Outbox:
        """An outbox to the inbox at ``address``, which has to admit the session.

        Raises ConfigError as ``inbox`` does.
        """
        place = self._allowed(address)
        outbox = Outbox(place, session, context_for(place, self._connecting))
        self._outboxes.append(outbox)
        return outbox

    def disconnect(self, outbox: Outbox) -> None:
        """Close one of its outboxes before the others."""
        if outbox in self._outboxes:
            self._outboxes.remove(outbox)
        outbox.close()

    def _allowed(self, address: str) -> Place:
        place = place_of(address)
        if self._listening is None and not self._private_network and not place.on_this_host:
            raise ConfigError(f"address {address!r} is beyond this host: that needs keys, which `penstock keys` makes")
        return place

    def close(self, linger: float = 0.0) -> None:
        """Close all outboxes, after at most ``linger`` seconds each for bytes that have yet to leave.

        Safe to call twice.
        """
        for outbox in self._outboxes:
            outbox.close(linger)
        self._outboxes.clear()

    def __enter__(self) -> Sockets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def context_for(place: Place, context: ssl.SSLContext | None) -> ssl.SSLContext | None:
    return None if place.is_ipc else context
