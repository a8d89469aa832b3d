"""Which connections are taken when there are too many.

A connection that has asked for nothing yet (half a head, or idle between two requests) makes room for a new one: the
oldest one of the address that has the most of them. Where every connection has a request under way, a few more are
taken, on which only a health check is answered: what is busy is not dead.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Final, Protocol

HEALTH_CHECKS: Final = 16
"""Connections beyond the limits that may ask for the server's health."""
SUBNET: Final = 64
"""Bits of an IPv6 address that count: one customer has all that begin with them."""


class Connection(Protocol):
    """What is known of one. ``address`` never changes."""

    @property
    def address(self) -> str: ...

    @property
    def busy(self) -> bool:
        """Whether a request is under way."""
        ...

    def turn_away(self) -> None:
        """Close it: there are too many."""
        ...


class Admission:
    """Counts connections in and out, all together and by address."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._taken: dict[Connection, str] = {}
        """With their address's key, from the oldest to the newest."""
        self._health_checks: set[Connection] = set()

    def admit(self, new: Connection) -> None:
        """Take it, in the place of another if need be. ``is_for_health`` says what it may ask."""
        key = key_of(new.address)
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
        """Whether it was taken beyond the limits."""
        return connection in self._health_checks

    def leave(self, connection: Connection) -> None:
        """It is closed. Safe to call twice."""
        self._taken.pop(connection, None)
        self._health_checks.discard(connection)

    def _has_too_many(self, key: str) -> bool:
        return len(self._taken) > self._most or self._of(key) > self._most_per_address

    def _of(self, key: str) -> int:
        return sum(one == key for one in self._taken.values())

    def _replaceable(self, key: str, new: Connection) -> Connection | None:
        """The oldest of those without a request: of ``key``'s if that has too many, else of whose has the most."""
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
    """What counts as one address; "" is one that is unknown."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, SUBNET), strict=False))
    return str(parsed)
