"""The sending ends of connections, and the sockets that open and close all of a process's ends."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final

from penstock.core import ConfigError
from penstock.transport.addresses import (
    MAX_FRAME_BYTES,
    SILENT_S,
    Bytes,
    LinkSecurity,
    Place,
    on_the_wire,
    place_of,
    prepare,
    reason_of,
    token_of,
    unanswered,
)
from penstock.transport.inbox import Inbox

# --------------------------------------------------------------------------------------------------------------- outbox
# The sending end of a connection, which never blocks its caller.
#
# A message leaves with one system call on the thread that sends it, and wakes nobody but the receiver. A writer thread
# sends the rest where the system does not take all at once. The same thread connects first: connecting may take a
# while, and two processes that wait for each other's answer would wait for ever.

log = logging.getLogger(__name__)

CONNECT_S: Final = float(SILENT_S)
"""Seconds within which the receiver's system has to accept a connection."""
HANDSHAKE_S: Final = 120.0
"""Seconds that the receiver has for each step of the TLS handshake: a stage answers none while it computes. Its first
batch may take as long (``pipeline.loss.FIRST_PATIENCE``)."""
PIECE: Final = 1 << 18
"""Bytes that are enciphered at a time, so that the receiver deciphers them while the next ones are enciphered."""
GONE: Final = (ConnectionError, FileNotFoundError)
"""Errors of connecting to a receiver that has left or never came. They are not logged here: others report a process's
end."""


class Outbox:
    """The sending end of a connection to an inbox. Messages arrive whole and in order, or not at all."""

    def __init__(self, place: Place, session: str, security: ssl.SSLContext | None = None) -> None:
        self.fault = ""
        """Why there is no connection, once that is known."""
        self._socket = socket.socket(place.family, socket.SOCK_STREAM)
        self._place = place
        self._security = security
        self._tls: Sealing | None = None
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        """Notified whenever queued bytes have left, or nothing will leave any more."""
        self._gone = False
        """Whether nothing will leave any more: no connection, or none left."""
        self._open = False
        """Whether connecting is over, successful or not."""
        self._early: list[Sequence[Bytes]] = [(token_of(session),)]
        """Messages that were sent before the connection was open; the session's token goes first."""
        self._rest: deque[Bytes] = deque()
        """Bytes that the writer thread has to send before anything else may leave."""
        self._writer: threading.Thread | None = None
        """The thread that connects, or sends ``_rest``; None while neither is to be done."""
        self._start(self._connect)

    @property
    def unreached(self) -> str:
        """Why messages do not arrive, once that is known: no connection, or no answer from the receiver's system.

        Empty otherwise, also where the receiver has closed the connection in good order.
        """
        with self._lock:
            if self.fault or self._gone or not self._open:
                return self.fault
            seconds = unanswered(self._socket)
        return f"no answer for {seconds:.0f} s" if seconds > SILENT_S else ""

    @property
    def backlog(self) -> int:
        """Bytes that were handed to ``send`` and have not left yet."""
        with self._lock:
            return self._waiting()

    def _waiting(self) -> int:
        return sum(map(len, self._rest)) + sum(len(part) for parts in self._early for part in parts)

    def drain(self, most: int) -> None:
        """Wait until at most ``most`` bytes have yet to leave, or none ever will."""
        with self._left:
            self._left.wait_for(lambda: self._gone or self._waiting() <= most)

    def send(self, *frames: Bytes) -> None:
        """Send a message of one or two frames. Never blocks; it is no error if the receiver is gone."""
        parts = on_the_wire(frames)
        with self._lock:
            if self._gone:
                return
            if self._open:
                self._leave(parts)
            else:
                # Copied, since the sender may reuse its buffers as soon as this returns.
                self._early.append([bytes(part) for part in parts])

    def _leave(self, parts: Sequence[Bytes]) -> None:
        for wire in (parts,) if self._tls is None else self._tls.seal(parts):
            # Messages keep their order: behind queued bytes a message is queued, too.
            sent = 0 if self._rest else self._send_now(wire)
            self._rest.extend(left_of(wire, sent))
        # Under the lock, like the writer's own decision to end: either it sees these bytes, or it has ended and a new
        # one starts.
        if self._rest and self._writer is None:
            self._start(self._write)

    def _send_now(self, wire: Sequence[Bytes]) -> int:
        """Send without blocking.

        Returns how many bytes the system has taken, or all of them if the receiver is gone.
        """
        try:
            return self._socket.sendmsg(wire, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._gone = True
            return sum(map(len, wire))

    def _start(self, work: Callable[[], None]) -> None:
        self._writer = threading.Thread(target=work, name="penstock outbox", daemon=True)
        self._writer.start()

    def _connect(self) -> None:
        try:
            self._socket.settimeout(CONNECT_S)
            prepare(self._socket)
            self._socket.connect(self._place.where)
            if self._gone:  # ``close`` was called before the connection was there, where its shutdown has no effect
                raise ConnectionAbortedError
            self._socket.settimeout(HANDSHAKE_S)
            if self._security is not None:
                self._tls = Sealing(self._socket, self._security)
            self._socket.settimeout(None)
        except Exception as error:  # usually OSError; whatever it is, ``unreached`` has to say it
            self.fault = reason_of(error)
            if not self._gone and not isinstance(error, GONE):
                log.warning("no connection to %s: %s", self._place, self.fault)
            self._gone = True
        with self._left:
            # Early messages leave under the same lock as ``_open`` is set: a later ``send`` cannot overtake them.
            self._open = True
            early, self._early = self._early, []
            for parts in () if self._gone else early:
                self._leave(parts)
            self._left.notify_all()
            if not self._rest:
                self._writer = None
                return
        self._write()

    def _write(self) -> None:
        while True:
            try:
                # Outside the lock, since it may block: ``send`` only appends behind the bytes that leave here.
                self._socket.sendall(self._rest[0])
            except OSError:  # the receiver has left, or this end was closed
                self._gone = True
            with self._left:
                # Removed only after they have left: as long as they are here, ``_leave`` queues behind them.
                self._rest.popleft()
                if self._gone:
                    self._rest.clear()
                self._left.notify_all()
                if not self._rest:
                    self._writer = None
                    return

    def close(self, linger: float = 0.0) -> None:
        """Close the connection, after at most ``linger`` seconds for bytes that have yet to leave.

        Safe to call twice.
        """
        writer = self._writer
        if writer is not None:
            writer.join(linger)
            self._gone = True
            with contextlib.suppress(OSError):  # wakes the writer, which closing alone would not
                self._socket.shutdown(socket.SHUT_RDWR)
            writer.join()
        self._socket.close()
        self._gone = True
        with self._left:
            self._left.notify_all()


def left_of(wire: Sequence[Bytes], sent: int) -> Iterator[bytes]:
    """The bytes of ``wire`` beyond the first ``sent``, as copies: a sender may reuse its buffers."""
    for part in wire:
        if sent < len(part):
            yield bytes(memoryview(part)[sent:])
        sent = max(0, sent - len(part))


class Sealing:
    """TLS over two memory buffers: enciphers the bytes of messages. The handshake uses a socket that may block."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        self._came, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._leaving)
        while not self._shaken(connection):
            came = connection.recv(PIECE)
            if not came:
                raise ConnectionResetError
            self._came.write(came)

    def _shaken(self, connection: socket.socket) -> bool:
        """Take the handshake as far as it goes. Returns whether it is complete."""
        try:
            self._tls.do_handshake()
            return True
        except ssl.SSLWantReadError:
            return False
        finally:
            connection.sendall(self._leaving.read())

    def seal(self, parts: Sequence[Bytes]) -> Iterator[list[bytes]]:
        """Encipher a message's bytes, piece by piece; each piece has to leave before the next one."""
        # The frames of a small message are enciphered together, so that it leaves with one system call.
        if sum(map(len, parts)) < PIECE:
            parts = (b"".join(parts),)
        for part in parts:
            with memoryview(part) as whole:
                for start in range(0, len(whole), PIECE):
                    self._tls.write(whole[start : start + PIECE])
                    yield [self._leaving.read()]


# -------------------------------------------------------------------------------------------------------------- sockets
# The inboxes and outboxes of one process. Without certificates none of them reaches beyond this host.


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
    """The context for connections at a place: none on Unix-domain sockets, which never leave the host."""
    return None if place.is_ipc else context
