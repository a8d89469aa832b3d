"""Addresses, certificates and readiness of the connections between an engine's processes."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import math
import os
import re
import select
import selectors
import socket
import ssl
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.core import ConfigError, PenstockError
from penstock.messages import MAX_HEADER_BYTES, FilePath, Frame

# -------------------------------------------------------------------------------------------------------------- framing
# Messages as bytes, in the same format on every connection.
#
# A connection begins with a token that can be made only with the session's secret; without it nothing more is read. A
# message is one frame or two. On the wire a frame is its length, whether another frame of the message follows, and its
# bytes.

FRAME: Final = struct.Struct("<I?")
"""The head of a frame: the frame's length in bytes, and whether another frame of the message follows."""
FRAMES: Final = 2
"""Upper limit of a message's frames: a header and a tensor."""
MAX_FRAME_BYTES: Final = 1 << 30
"""Upper limit of a frame, in bytes; 512 rows of 8,192 numbers in float32 take 16 MiB."""
assert MAX_HEADER_BYTES < MAX_FRAME_BYTES
TOKEN_BYTES: Final = 32
"""Bytes of the token that a connection begins with: a SHA-256 digest of the secret."""
LARGE: Final = 1 << 16
"""Size in bytes from which an incomplete frame gets a buffer of its own, into which the rest is read without a copy.
For smaller ones a copy costs little."""

Bytes = bytes | bytearray | memoryview


class FramingError(PenstockError):
    """Bytes on a connection that are not a valid frame."""


def token_of(session: str) -> bytes:
    """The token with which a session's connections begin. Its length is fixed, so that no peer announces a size."""
    return hashlib.sha256(session.encode()).digest()


def on_the_wire(frames: Sequence[Bytes]) -> list[Bytes]:
    """A message's bytes. Only the last frame, which may be a large tensor, is not copied."""
    parts: list[Bytes] = []
    for i, frame in enumerate(frames, start=1):
        parts += (FRAME.pack(len(frame), i < len(frames)), frame)
    return [b"".join(parts[:-1]), parts[-1]]


class MessageReader:
    """Cuts a connection's bytes into messages, wherever the reads have split them.

    The reader puts bytes into ``room`` and says with ``take`` how many there are. No frame may exceed ``most`` bytes.
    """

    def __init__(self, most: int = MAX_FRAME_BYTES) -> None:
        self._most = most
        self._held = bytearray()
        """Bytes of a frame that is not complete."""
        self._large: bytearray | None = None
        """The buffer of an incomplete large frame, of which ``_filled`` bytes are there; ``_held`` is empty then."""
        self._filled = 0
        self._more = False
        """Whether another frame of the message follows the large one."""
        self._frames: list[Frame] = []
        """The first frames of a message that is not complete."""

    def room(self, chunk: memoryview) -> memoryview:
        """The buffer in which the next bytes belong: the rest of a large frame, or else ``chunk``."""
        return chunk if self._large is None else memoryview(self._large)[self._filled :]

    def take(self, room: memoryview, count: int) -> list[list[Frame]]:
        """Every message that these ``count`` bytes in ``room`` complete. Raises FramingError."""
        if self._large is not None:
            return self._take_large(count)
        came = room[:count]
        if not self._held:  # the usual case, without a copy: messages arrive whole
            messages, end = self._messages_in(came)
            self._held += came[end:]
            return messages
        self._held += came
        with memoryview(self._held) as held:
            messages, end = self._messages_in(held)
        # Only now: a bytearray cannot shrink while a view of it exists. Frames are copies, or buffers of their own, so
        # that none points into these bytes.
        del self._held[:end]
        return messages

    def _take_large(self, count: int) -> list[list[Frame]]:
        assert self._large is not None
        self._filled += count
        if self._filled < len(self._large):
            return []
        frame, self._large = self._large, None
        return self._with(frame, self._more)

    def _messages_in(self, held: memoryview) -> tuple[list[list[Frame]], int]:
        """The messages that end in ``held``, and the index from which on its bytes have to be kept."""
        messages: list[list[Frame]] = []
        start = 0
        while len(held) >= start + FRAME.size:
            length, more = self._announced(held, start)
            first, end = start + FRAME.size, start + FRAME.size + length
            if end > len(held):
                if length < LARGE:
                    break
                # The rest is read into the frame's own buffer: nothing behind this frame has arrived yet.
                self._begin_large(held[first:], length, more)
                return messages, len(held)
            messages += self._with(held[first:end].tobytes(), more)
            start = end
        return messages, start

    def _announced(self, held: memoryview, start: int) -> tuple[int, bool]:
        """A frame's length, and whether another one follows it.

        Raises FramingError before anything is allocated for it.
        """
        if len(self._frames) == FRAMES:
            raise FramingError(f"a message of more than {FRAMES} frames")
        # Checked before ``unpack_from``, which would take any other byte for True.
        if held[start + FRAME.size - 1] > 1:
            raise FramingError("a frame's mark is neither 0 nor 1")
        length, more = FRAME.unpack_from(held, start)
        if length > self._most:
            raise FramingError(f"a frame of {length} bytes; {self._most} are the most")
        return length, more

    def _begin_large(self, came: memoryview, length: int, more: bool) -> None:
        self._large, self._filled, self._more = bytearray(length), len(came), more
        self._large[: len(came)] = came

    def _with(self, frame: Frame, more: bool) -> list[list[Frame]]:
        """The message that this frame completes, if it does."""
        self._frames.append(frame)
        if more:
            return []
        message, self._frames = self._frames, []
        return [message]


# ------------------------------------------------------------------------------------------------------------ addresses
# Where an inbox listens: ``ipc://PATH`` on this host, ``tcp://HOST:PORT`` anywhere. Port * is any free one.

IPC: Final = "ipc://"
TCP: Final = "tcp://"
PORT: Final = re.compile(r"[0-9]{1,5}")
MOST_PORT: Final = 65535
"""The largest TCP port."""
WAITING: Final = 128
"""Number of connections that may wait to be accepted. A pipeline's stages, up to 128, connect at about the same
time."""
ON_ITS_WAY: Final = 1 << 22
"""Bytes that the system is asked to buffer for a busy receiver on this host; it may grant fewer. TCP sizes its own
buffers. The rest of a message waits in a thread of the sender's (``transport.outbox``)."""
SILENT_S: Final = 7
"""Seconds without an answer from the other end's system after which a tcp connection counts as broken. They are the 3
until the first probe and the two that 2 further probes take each (``TCP_OPTIONS``)."""
TCP_OPTIONS: Final = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 2}
"""Options of tcp connections, set where the system has them: no delay for small messages, and keep-alive probes, the
first after 3 idle seconds, the others every 2 seconds.

Probes find a dead peer while nothing is under way, so every receiver finds it; ``unanswered`` does while data is.
TCP_USER_TIMEOUT would also break connections to a process that reads nothing because it computes or is stopped.
"""
STATE_BYTES: Final = 60
"""Bytes of Linux's ``tcp_info`` up to and with the field that is read."""
SINCE_ANSWER: Final = struct.Struct("56xI")
"""The field of ``tcp_info`` with the milliseconds since the latest acknowledgement (tcpi_last_ack_recv)."""


@dataclass(frozen=True)
class Place:
    """A resolved address, to which a socket can be bound or connected."""

    family: int
    where: Any

    def __str__(self) -> str:
        if self.is_ipc:
            return str(self.where)
        host, port = self.where[:2]
        return f"{in_url(host)}:{port}"

    @property
    def is_ipc(self) -> bool:
        return self.family == socket.AF_UNIX

    @property
    def on_this_host(self) -> bool:
        """Whether it can be reached from this host only."""
        return self.is_ipc or is_loopback(self.where[0])


def in_url(address: str) -> str:
    """An address as URLs have it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def is_loopback(address: str) -> bool:
    """Whether an address, in numbers, is this host's own; IPv6 writes those of IPv4 as ::ffff:127.0.0.1, too."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def place_of(address: str, look_up: bool = False) -> Place:
    """Resolve an address. Raises ConfigError for anything else.

    The host has to be a numeric address unless ``look_up`` permits a name, which may take as long as its name servers
    do.
    """
    if address.startswith(IPC):
        return Place(socket.AF_UNIX, address.removeprefix(IPC))
    host, _, port = address.removeprefix(TCP).rpartition(":")
    if not address.startswith(TCP) or not host or not (port == "*" or PORT.fullmatch(port)):
        raise ConfigError(f"address {address!r} is neither {IPC}PATH nor {TCP}HOST:PORT")
    # Port 0 lets the system choose.
    number = 0 if port == "*" else int(port)
    if number > MOST_PORT:
        raise ConfigError(f"address {address!r}: ports end at {MOST_PORT}")
    flags = 0 if look_up else socket.AI_NUMERICHOST
    try:
        found = socket.getaddrinfo(host.strip("[]"), number, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(f"address {address!r}: {error}") from error
    return Place(found[0][0], found[0][4])


def is_unspecified(host: str) -> bool:
    """Whether a numeric address (0.0.0.0 or ::) stands for all addresses of a host."""
    return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_unspecified


def address_of(listener: socket.socket) -> str:
    """The address under which others reach a listener."""
    if listener.family == socket.AF_UNIX:
        return f"{IPC}{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{TCP}[{host}]:{port}" if listener.family == socket.AF_INET6 else f"{TCP}{host}:{port}"


def listener_at(place: Place) -> socket.socket:
    """A non-blocking socket that listens. Raises OSError if the place is taken."""
    listener = socket.socket(place.family, socket.SOCK_STREAM)
    try:
        if not place.is_ipc:
            # A port whose last connections are still in TIME_WAIT can be taken again at once, as by a worker that is
            # restarted.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(place.where)
        listener.listen(WAITING)
    except BaseException:
        listener.close()
        raise
    return listener


def close_listener(listener: socket.socket) -> None:
    """Close it, and remove the file of its Unix-domain socket."""
    path = listener.getsockname() if listener.family == socket.AF_UNIX else None
    listener.close()
    if path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def unanswered(connection: socket.socket) -> float:
    """Seconds since the system at the other end of a tcp connection acknowledged anything; 0 where that is unknown.

    The system acknowledges also for a process that is busy or stopped. While nothing is sent, keep-alive probes ask it
    every few seconds.
    """
    if connection.family == socket.AF_UNIX or sys.platform != "linux":
        return 0.0
    (since,) = SINCE_ANSWER.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, STATE_BYTES))
    return float(since) / 1000


def prepare(connection: socket.socket) -> None:
    """Set the options that every connection has."""
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ON_ITS_WAY)
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_OPTIONS.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# ------------------------------------------------------------------------------------------------------------- security
# Mutual TLS between hosts: the certificate that a process shows, and the authority it trusts.


class LinkSecurity(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of PEM files: the cluster's authority, and this host's certificate and key, signed by that authority.

    Both ends of a connection show a certificate. It proves that its owner is a member of the cluster, not which one:
    every member may do the same. Only TLS 1.3 is spoken.
    """

    authority: FilePath
    certificate: FilePath
    key: FilePath

    def for_listening(self) -> ssl.SSLContext:
        """A server's context.

        Raises ConfigError, like ``for_connecting``, for a file that is missing or not as it should be.
        """
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        # A ticket would lie unread at the sender's end, and its closing would then break the connection off.
        context.num_tickets = 0
        return context

    def for_connecting(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # hosts' addresses change, and membership is all that counts
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(self.authority)
        except OSError as error:  # SSLError is one
            raise ConfigError(f"link security: authority {self.authority}: {reason_of(error)}") from error
        try:
            # The empty password keeps OpenSSL from asking for one on the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"link security: certificate {self.certificate} with key {self.key}: {reason_of(error)}"
            ) from error
        return context


UNKNOWN_AUTHORITY: Final = (7, 18, 19, 20, 21)
"""OpenSSL's numbers (X509_V_ERR) for certificates that no known authority has signed, or one of the same name."""
OTHER_KEYS: Final = "its keys are not those of this cluster"
MEANINGS: Final = {
    "TLSV1_ALERT_UNKNOWN_CA": OTHER_KEYS,
    "TLSV1_ALERT_DECRYPT_ERROR": OTHER_KEYS,
    "WRONG_VERSION_NUMBER": "it does without keys (--insecure), and this host has some, or the other way round",
}
"""The meaning of OpenSSL's reasons on a link between hosts, where both ends show certificates."""


def reason_of(error: Exception) -> str:
    """The reason for an error: its meaning for a cluster's links if known, and the words of OpenSSL or the system."""
    if isinstance(error, ssl.SSLCertVerificationError):
        said, unknown = error.verify_message, error.verify_code in UNKNOWN_AUTHORITY
        return f"{OTHER_KEYS} ({said})" if unknown else said
    if isinstance(error, ssl.SSLError) and error.reason:
        said, meaning = error.reason.replace("_", " ").lower(), MEANINGS.get(error.reason)
        return f"{meaning} ({said})" if meaning else said
    return getattr(error, "strerror", None) or str(error)


# ------------------------------------------------------------------------------------------------------------- readable
# Waiting for readable file descriptors, of any number, with a timeout that is precise to microseconds.

SELECTABLE: Final = 1024
"""The number below which ``select`` accepts descriptors."""


class Readable:
    """A set of descriptors to wait for.

    epoll takes any descriptor, but its timeouts are whole milliseconds. ``select`` keeps the moment, so it waits for a
    single descriptor, epoll's own. Where even that number is too high, because the process had a thousand files open
    before, the wait ends up to a millisecond early.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def fileno(self) -> int:
        """The descriptor of the set itself, which is readable while one in it is."""
        return self._selector.fileno()  # type: ignore[attr-defined,no-any-return]  # of epoll and kqueue

    def add(self, fd: int) -> None:
        self._selector.register(fd, selectors.EVENT_READ)

    def remove(self, fd: int) -> None:
        """Raises KeyError for a descriptor that is not in the set. Call it before the descriptor is closed."""
        self._selector.unregister(fd)

    def wait(self, seconds: float | None) -> list[int]:
        """The readable descriptors; none if ``seconds``, or slightly less, pass before. None waits without a limit."""
        if seconds is not None and seconds > 0:
            own = self.fileno()
            if own >= SELECTABLE:
                # ``selectors`` rounds a timeout up to whole milliseconds: half of one less gives the last one before
                # the moment.
                return self._ready((math.floor(1e3 * seconds) - 0.5) / 1e3)
            if not select.select([own], [], [], seconds)[0]:
                return []
            seconds = 0.0
        return self._ready(seconds)

    def _ready(self, seconds: float | None) -> list[int]:
        return [key.fd for key, _ in self._selector.select(seconds)]

    def close(self) -> None:
        """Safe to call twice."""
        self._selector.close()


# -------------------------------------------------------------------------------------------------------------- waiting
# Waiting until a moment, precisely to microseconds.

OVERSLEEP: Final = 60e-6
"""Seconds by which a sleep ends late, roughly: a processor takes time to wake."""


def left_until(moment: float) -> float:
    """Seconds that a thread may sleep so as to be awake at a moment of the monotonic clock."""
    return max(0.0, moment - OVERSLEEP - time.monotonic())


def slept_until(moment: float) -> bool:
    """Sleep until just before a moment of the monotonic clock. Returns whether there was time for that."""
    left = left_until(moment)
    if left > 0:
        time.sleep(left)
    return left > 0


def sleep_until(moment: float) -> None:
    """Return at a moment of the monotonic clock: sleeps until just before it, then spins."""
    slept_until(moment)
    while time.monotonic() < moment:
        pass
