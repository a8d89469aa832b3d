"""How a host gets its keys: with a token that works once, from the host that has the cluster's authority.

    authority's host                                          the new host
    listens, shows a certificate made for the occasion
    prints a token: its address, the certificate's digest, a secret
                                                              makes its own key
            <--------------- TLS: it is the token's certificate ----------------
            <--------------- the secret, a request for a certificate ----------
            ---------------- the authority's certificate, the host's own ------>
    listens no more

The new host's key never leaves it, and whoever lacks the token learns nothing and gets nothing.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import ssl
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from cryptography.hazmat.primitives import hashes, serialization

from penstock.core import ConfigError
from penstock.hosts import keys
from penstock.transport.addresses import place_of
from penstock.transport.security import reason_of

EXCHANGE_S: Final = 10.0
"""Seconds in which either end has to have heard the other one out, however it spreads what it says."""
MOST_CONNECTIONS: Final = 16
"""That are heard at a time."""
MOST_BYTES: Final = 1 << 14
"""Of what either end says."""
DIGEST_BYTES: Final = 16
SECRET_BYTES: Final = 16


@dataclass(frozen=True)
class Token:
    """What a new host has to know."""

    address: str
    """HOST:PORT."""
    digest: bytes
    """Of the certificate that is shown there."""
    secret: bytes

    def __str__(self) -> str:
        hidden = base64.urlsafe_b64encode(self.digest + self.secret).decode().rstrip("=")
        return f"{self.address}/{hidden}"


def token_of(text: str) -> Token:
    """Raises ConfigError for what is no token."""
    address, _, hidden = text.strip().rpartition("/")
    with contextlib.suppress(ValueError):
        found = base64.urlsafe_b64decode(hidden + "=" * (-len(hidden) % 4))
        if address and len(found) == DIGEST_BYTES + SECRET_BYTES:
            return Token(address, found[:DIGEST_BYTES], found[DIGEST_BYTES:])
    raise ConfigError("token: this is none; `penstock keys add` prints them whole, HOST:PORT/ and 43 letters")


class Application(msgspec.Struct, frozen=True):
    secret: bytes
    request: bytes


class Membership(msgspec.Struct, tag="membership", frozen=True):
    authority: bytes
    certificate: bytes


class Refusal(msgspec.Struct, tag="refusal", frozen=True):
    """The token was made for the host called ``name``, and stays to be used by it."""

    name: str


class Enrolment:
    """Listens for one new host, which calls itself ``name``. Raises ConfigError where the folder has no authority."""

    def __init__(self, folder: Path, name: str, address: str) -> None:
        self._folder = folder
        self._name = name
        keys.sign(folder, pem(keys.request_of(keys.new_key(), name)))  # that it could
        self._context, digest = throwaway_certificate()
        place = place_of(f"tcp://{address}", look_up=True)
        self._listener = socket.create_server(place.where[:2], family=place.family)
        self._joined, self._once = threading.Event(), threading.Lock()
        self._woken, self._waker = socket.socketpair()
        host, _, _ = address.rpartition(":")
        self.token = Token(f"{host}:{self._listener.getsockname()[1]}", digest, secrets.token_bytes(SECRET_BYTES))

    def serve(self, seconds: float) -> bool:
        """Give one host its keys, within so many seconds. Returns whether one came.

        Whoever connects has ``EXCHANGE_S`` for all that it says. Strangers hold nobody up: several are heard at a time,
        and beyond ``MOST_CONNECTIONS`` the one that came first gives way.
        """
        deadline = time.monotonic() + seconds
        under_way: deque[socket.socket] = deque()
        while not self._joined.is_set() and (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([self._listener, self._woken], [], [], left)
            if self._listener not in ready:
                continue
            with contextlib.suppress(OSError):  # it has left again
                connection, _ = self._listener.accept()
                connection.settimeout(EXCHANGE_S)
                under_way.append(handle := connection.dup())
                threading.Thread(target=self._hear, args=(connection, handle), daemon=True).start()
            while len(under_way) > MOST_CONNECTIONS:
                end_exchange(under_way.popleft())
        for handle in list(under_way):
            end_exchange(handle)
        return self._joined.is_set()

    def _hear(self, connection: socket.socket, handle: socket.socket) -> None:
        """On a thread of its own. ``handle`` is the connection, too: by it others end what is said there."""
        with handle, connection, within(connection):
            with contextlib.suppress(OSError, msgspec.MsgspecError, ConfigError):
                self._answer(connection)
            end_exchange(handle)

    def _answer(self, connection: socket.socket) -> None:
        with self._context.wrap_socket(connection, server_side=True) as sealed:
            asked = msgspec.msgpack.decode(read(sealed), type=Application)
            if not hmac.compare_digest(asked.secret, self.token.secret):
                return
            if not is_called(keys.name_in(asked.request), self._name):
                write(sealed, Refusal(self._name))
                return
            with self._once:  # of two who have the token, one gets keys
                if self._joined.is_set():
                    return
                authority, own = keys.sign(self._folder, asked.request)
                write(sealed, Membership(authority, own))
                self._joined.set()
        self._waker.send(b"!")

    def close(self) -> None:
        for end in (self._listener, self._woken, self._waker):
            end.close()

    def __enter__(self) -> Enrolment:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def join(folder: Path, text: str, name: str) -> None:
    """Get keys with a token's text, and keep them in ``folder``.

    ``name`` is what this host calls itself. Raises ConfigError where the folder has keys, where nobody who made the
    token listens, if it has been used, and if it was made for another host.
    """
    token = token_of(text)
    if (folder / keys.HOST).exists():
        raise ConfigError(f"keys: {folder} holds keys already, with which this host is a member; leave the token out")
    keys.check_empty(folder)
    key = keys.new_key()
    try:
        told = asked_for_membership(token, pem(keys.request_of(key, name)))
    except (OSError, msgspec.MsgspecError) as error:
        reason = reason_of(error)
        raise ConfigError(f"token: {token.address}: {reason}; a token works once, while its command runs") from error
    if isinstance(told, Refusal):
        raise ConfigError(
            f"token: it was made for {told.name}, and this host calls itself {name}; `penstock keys add {name}` makes "
            "one for it"
        )
    keys.keep(folder, key, told.authority, told.certificate)


def is_called(name: str, made_for: str) -> bool:
    """Whether a host's name is the one that a token was made for, which may leave the domain out."""
    first, second = (one.casefold().partition(".") for one in (name, made_for))
    return first[0] == second[0] and (not (first[2] and second[2]) or first[2] == second[2])


def asked_for_membership(token: Token, request: bytes) -> Membership | Refusal:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # what it shows is compared with the token
    place = place_of(f"tcp://{token.address}", look_up=True)
    with (
        socket.create_connection(place.where[:2], timeout=EXCHANGE_S) as connection,
        within(connection),
        context.wrap_socket(connection) as sealed,
    ):
        shown = sealed.getpeercert(binary_form=True) or b""
        if not hmac.compare_digest(digest_of(shown), token.digest):
            raise ConfigError(f"token: who listens at {token.address} has not made it")
        write(sealed, Application(token.secret, request))
        answer: Membership | Refusal = msgspec.msgpack.decode(read(sealed), type=Membership | Refusal)  # type: ignore[call-overload]
        return answer


def throwaway_certificate() -> tuple[ssl.SSLContext, bytes]:
    """One that only the token vouches for, and its digest."""
    key, name = keys.new_key(), keys.named("penstock enrolment")
    made = keys.certificate(name, name, key.public_key(), 1).sign(key, hashes.SHA256())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "both.pem"
        keys.write_secret(file, keys.in_pem(key) + made.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(file)
    return context, digest_of(made.public_bytes(serialization.Encoding.DER))


def digest_of(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()[:DIGEST_BYTES]


def pem(request: object) -> bytes:
    return request.public_bytes(serialization.Encoding.PEM)  # type: ignore[attr-defined, no-any-return]


@contextlib.contextmanager
def within(connection: socket.socket) -> Iterator[None]:
    """Have the connection end after ``EXCHANGE_S``, whatever is under way on it: a time-out of its own is per read."""
    with connection.dup() as handle:
        watch = threading.Timer(EXCHANGE_S, end_exchange, (handle,))
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()


def end_exchange(connection: socket.socket) -> None:
    """Whoever reads or writes there is told that it has ended."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def write(sealed: ssl.SSLSocket, message: msgspec.Struct) -> None:
    content = msgspec.msgpack.encode(message)
    sealed.sendall(len(content).to_bytes(4, "little") + content)


def read(sealed: ssl.SSLSocket) -> bytes:
    """What the other end says. Raises ConnectionError if it ends before, or would say too much."""
    length = int.from_bytes(exactly(sealed, 4), "little")
    if length > MOST_BYTES:
        raise ConnectionError("it says too much")
    return exactly(sealed, length)


def exactly(sealed: ssl.SSLSocket, count: int) -> bytes:
    came = b""
    while len(came) < count:
        more = sealed.recv(count - len(came))
        if not more:
            raise ConnectionError("it has hung up")
        came += more
    return came
