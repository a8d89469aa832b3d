"""Lets a worker come to a head by itself, so that only the head's address has to be known."""

from __future__ import annotations

import logging
import threading
from typing import Final

from penstock.hosts.control import HEAD_DOOR, Join, encode
from penstock.hosts.remote import places_of
from penstock.transport.security import LinkSecurity
from penstock.transport.sockets import Sockets

log = logging.getLogger(__name__)

AGAIN_S: Final = 3.0
"""Seconds between two messages: a head that was away, or starts later, gets the next one."""


class Joining:
    """A thread that tells the head at ``door`` (HOST:PORT), again and again, that ``host`` (HOST:PORT) listens.

    Raises FieldError for an invalid address. ``close`` ends the thread.
    """

    def __init__(self, door: str, host: str, security: LinkSecurity | None, private_network: bool) -> None:
        self._door = door
        self._host = host
        _, self._address = places_of(door)
        self._sockets = Sockets(security, private_network)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock joining", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        fault = None
        while not self._closing.is_set():
            outbox = self._sockets.connect(self._address, HEAD_DOOR)
            outbox.send(encode(Join(host=self._host), HEAD_DOOR))
            self._closing.wait(AGAIN_S)
            if outbox.fault != fault:
                fault = outbox.fault
                log.info("%s", f"no head at {self._door} yet: {fault}" if fault else f"has come to {self._door}")
            self._sockets.disconnect(outbox)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._sockets.close()

    def __enter__(self) -> Joining:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
