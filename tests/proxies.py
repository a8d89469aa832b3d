"""A connection that can be cut while both ends live."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Final

PIECE: Final = 1 << 16


class Proxy:
    """Passes on, one way, what comes over the one connection that it takes. ``address`` stands for ``to``."""

    def __init__(self, to: str) -> None:
        host, _, port = to.removeprefix("tcp://").rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._onward = socket.create_connection((host, int(port)))
        self._incoming: socket.socket | None = None
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            self._incoming, _ = self._listener.accept()
            while piece := self._incoming.recv(PIECE):
                self._onward.sendall(piece)

    def cut(self) -> None:
        for one in (self._incoming, self._onward, self._listener):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
        self._thread.join()
