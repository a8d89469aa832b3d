"""Limits on a request's head: its size, whether it comes in one piece or several, and how it may frame the body."""

from __future__ import annotations

from typing import Any, Final

import h11

MOST_HEAD: Final = 16 << 10
"""Most bytes from the request line to the empty line."""


class BoundedHeads(h11.Connection):
    """h11's server connection with a limit on complete heads, too; h11 itself limits only incomplete ones."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MOST_HEAD)
        self.head_too_large = False
        self.problem = ""
        """The problem with data that is not HTTP."""

    def next_event(self) -> Any:
        """The next event, as from h11. Raises RemoteProtocolError for invalid HTTP, of status 431 for a large head."""
        try:
            return self._next_event()
        except h11.RemoteProtocolError as error:
            self.problem = str(error)
            raise

    def _next_event(self) -> Any:
        if self.their_state is not h11.IDLE:
            return super().next_event()
        # Bytes that wait to be parsed: how many fewer there are afterwards is the head's size.
        before = len(self.trailing_data[0])
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            # A large head that came whole may be refused for its content; its size is the reason all the same.
            self.head_too_large = error.error_status_hint == 431 or self._taken(before) > MOST_HEAD
            raise
        if isinstance(event, h11.Request) and self._taken(before) > MOST_HEAD:
            self.head_too_large = True
            raise h11.RemoteProtocolError("head too large", error_status_hint=431)
        if isinstance(event, h11.Request):
            check_framing(event)
        return event

    def _taken(self, before: int) -> int:
        """Bytes that the last event took, of the ``before`` bytes that had been received."""
        return before - len(self.trailing_data[0])


def check_framing(request: h11.Request) -> None:
    """Raise RemoteProtocolError where a proxy may see another end of the body than this server (request smuggling).

    RFC 9112, section 6.1: a length beside chunks, and chunks in HTTP/1.0, ought to be handled as an error.
    """
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and b"content-length" in names:
        raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding: send one of them")
    if b"transfer-encoding" in names and request.http_version != b"1.1":
        raise h11.RemoteProtocolError("Transfer-Encoding in HTTP/1.0: send Content-Length, or HTTP/1.1")
