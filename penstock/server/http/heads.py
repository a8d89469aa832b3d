"""What a request's head may be: how large, whether it comes in one piece or in many, and how it may frame its body."""

from __future__ import annotations

from typing import Any, Final

import h11

MOST_HEAD: Final = 16 << 10
"""Bytes from the request line to the empty line."""


class BoundedHeads(h11.Connection):
    """h11's connection of a server. h11 itself bounds heads that have not come to their end."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MOST_HEAD)
        self.head_too_large = False
        self.problem = ""
        """What was wrong with what is no HTTP."""

    def next_event(self) -> Any:
        """As h11's. Raises RemoteProtocolError for what is no HTTP; of status 431 for a head that is too large."""
        try:
            return self._next_event()
        except h11.RemoteProtocolError as error:
            self.problem = str(error)
            raise

    def _next_event(self) -> Any:
        if self.their_state is not h11.IDLE:
            return super().next_event()
        before = len(self.trailing_data[0])
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            # One that is large and has come whole may be refused for what it says: it is too large all the same.
            self.head_too_large = error.error_status_hint == 431 or self._taken(before) > MOST_HEAD
            raise
        if isinstance(event, h11.Request) and self._taken(before) > MOST_HEAD:
            self.head_too_large = True
            raise h11.RemoteProtocolError("head too large", error_status_hint=431)
        if isinstance(event, h11.Request):
            check_framing(event)
        return event

    def _taken(self, before: int) -> int:
        """Bytes that the last event took of the ``before`` that had come."""
        return before - len(self.trailing_data[0])


def check_framing(request: h11.Request) -> None:
    """Raise RemoteProtocolError where a proxy may see another end of the body than this server (request smuggling).

    RFC 9112, 6.1: a length beside chunks, or chunks in HTTP/1.0, are to be taken for an attack.
    """
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and b"content-length" in names:
        raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding: send one of them")
    if b"transfer-encoding" in names and request.http_version != b"1.1":
        raise h11.RemoteProtocolError("Transfer-Encoding in HTTP/1.0: send Content-Length, or HTTP/1.1")
