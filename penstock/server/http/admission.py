"""Admission of connections when there are too many.

A connection without a request (half a head received, or idle between two requests) makes room for a new one: the oldest
such connection of the address that has most of them is closed. Where every connection has a request under way, a few
more are admitted, on which only a health check is answered: a busy server must not look dead.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Final, Protocol

HEALTH_CHECKS: Final = 16
"""Connections beyond the limits that are admitted for health checks."""
SUBNET: Final = 64
"""Prefix length in bits that counts as one IPv6 address: a customer usually has a whole /64."""


class Connection(Protocol):
    """A connection as admission sees it. ``address`` never changes."""

    @property
    def address(self) -> str: ...

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        ...

    def turn_away(self) -> None:
        """Close the connection, because there are too many."""
        ...


class Admission:
    """The count of open connections, in all and by address, with its limits."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._taken: dict[Connection, str] = {}
        """Open connections, oldest first, each with its address's key."""
        self._health_checks: set[Connection] = set()

    def admit(self, new: Connection) -> None:
        """Admit a connection, closing another one if need be; ``is_for_health`` then says what it may ask for."""
        key = key_of(new.address)
        # Counted first, so that the limits are checked with it included.
        self._taken[new] = key
        while self._has_too_many(key) and (old := self._replaceable(key, new)) is not None:
            self.leave(old)
            old.turn_away()
        if not self._has_too_many(key):
            return
        if len(self._health_checks) < HEALTH_CHECKS:
            self._health_checks.add(new)
        else:
            self.leave(new)
            new.turn_away()

    def is_for_health(self, connection: Connection) -> bool:
        """Whether the connection was admitted beyond the limits, for health checks alone."""
        return connection in self._health_checks

    def leave(self, connection: Connection) -> None:
        """Remove a closed connection. A second call does nothing."""
        self._taken.pop(connection, None)
        self._health_checks.discard(connection)

    def _has_too_many(self, key: str) -> bool:
        return len(self._taken) > self._most or self._of(key) > self._most_per_address

    def _of(self, key: str) -> int:
        return sum(one == key for one in self._taken.values())

    def _replaceable(self, key: str, new: Connection) -> Connection | None:
        """The oldest connection without a request: of ``key`` if that has too many, else of the busiest key."""
        own = self._of(key) > self._most_per_address
        waiting = [
            (one, its)
            for one, its in self._taken.items()
            if one is not new and not one.busy and (its == key or not own)
        ]
        if not waiting:
            return None
        ((most, _),) = Counter(its for _, its in waiting).most_common(1)
        return next(one for one, its in waiting if its == most)


def key_of(address: str) -> str:
    """The key under which an address is counted: IPv6 addresses by subnet, "" for an unknown one."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, SUBNET), strict=False))
    return str(parsed)
