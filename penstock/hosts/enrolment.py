"""Gives a new host its keys: with a token that works once, from the host that has the cluster's authority.

    authority's host                                          the new host
    listens, shows a certificate made for the occasion
    prints a token: its address, the certificate's digest, a secret
                                                              makes its own key
            <--------------- TLS: it is the token's certificate ----------------
            <--------------- the secret, a request for a certificate ----------
            ---------------- the authority's certificate, the host's own ------>
    listens no more

The new host's private key never leaves it, and nobody without the token learns or gets anything.
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
from penstock.scratch import scratch_folder
from penstock.transport.addresses import place_of
from penstock.transport.security import reason_of

EXCHANGE_S: Final = 10.0
"""Seconds that a whole exchange may take, however slowly the other end sends."""
MOST_CONNECTIONS: Final = 16
"""Most connections that are served at a time."""
MOST_BYTES: Final = 1 << 14
"""Most bytes of a message of either end."""
DIGEST_BYTES: Final = 16
SECRET_BYTES: Final = 16


@dataclass(frozen=True)
class Token:
    """All that a new host has to know; its text is what a person copies from one host to the other."""

    address: str
    """HOST:PORT at which the authority's host listens."""
    digest: bytes
    """The digest of the certificate that is shown there."""
    secret: bytes

    def __str__(self) -> str:
        hidden = base64.urlsafe_b64encode(self.digest + self.secret).decode().rstrip("=")
        return f"{self.address}/{hidden}"


def token_of(text: str) -> Token:
    """The token of a text. Raises ConfigError if it is none."""
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
    """The token was made for the host called ``name``, which can still use it."""

    name: str


class Enrolment:
    """Listens for one new host, which calls itself ``name``. Raises ConfigError if the folder has no authority."""

    def __init__(self, folder: Path, name: str, address: str) -> None:
        self._folder = folder
        self._name = name
        keys.sign(folder, pem(keys.request_of(keys.new_key(), name)))  # on trial: raises now if it cannot sign
        self._context, digest = throwaway_certificate()
        place = place_of(f"tcp://{address}", look_up=True)
        self._listener = socket.create_server(place.where[:2], family=place.family)
        self._joined, self._once = threading.Event(), threading.Lock()
        self._woken, self._waker = socket.socketpair()
        host, _, _ = address.rpartition(":")
        self.token = Token(f"{host}:{self._listener.getsockname()[1]}", digest, secrets.token_bytes(SECRET_BYTES))

    def serve(self, seconds: float) -> bool:
        """Give one host its keys, within ``seconds``. Returns whether one came.

        A connection has ``EXCHANGE_S`` seconds for its whole exchange. Strangers hold nobody up: several connections
        are served at a time, and beyond ``MOST_CONNECTIONS`` the oldest one is closed.
        """
        deadline = time.monotonic() + seconds
        under_way: deque[socket.socket] = deque()
        while not self._joined.is_set() and (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([self._listener, self._woken], [], [], left)
            if self._listener not in ready:
                continue
            with contextlib.suppress(OSError):  # the other end has left already
                connection, _ = self._listener.accept()
                connection.settimeout(EXCHANGE_S)
                under_way.append(handle := connection.dup())  # by which this thread can end the exchange at any time
                threading.Thread(target=self._hear, args=(connection, handle), daemon=True).start()
            while len(under_way) > MOST_CONNECTIONS:
                end_exchange(under_way.popleft())
        for handle in list(under_way):
            end_exchange(handle)
        return self._joined.is_set()

    def _hear(self, connection: socket.socket, handle: socket.socket) -> None:
        """Serve a connection, on a thread of its own. ``handle`` is its duplicate, by which other threads end it."""
        with handle, connection, within(connection):
            with contextlib.suppress(OSError, msgspec.MsgspecError, ConfigError):
                self._answer(connection)
            end_exchange(handle)

    def _answer(self, connection: socket.socket) -> None:
        with self._context.wrap_socket(connection, server_side=True) as sealed:
            asked = msgspec.msgpack.decode(read(sealed), type=Application)
            if not hmac.compare_digest(asked.secret, self.token.secret):
                return  # without an answer: a stranger learns nothing
            if not is_called(keys.name_in(asked.request), self._name):
                write(sealed, Refusal(self._name))
                return
            with self._once:  # if two connections have the token, one of them gets keys
                if self._joined.is_set():
                    return
                authority, own = keys.sign(self._folder, asked.request)
                write(sealed, Membership(authority, own))
                self._joined.set()  # last: if the answer cannot be sent, the token still works
        self._waker.send(b"!")

    def close(self) -> None:
        for end in (self._listener, self._woken, self._waker):
            end.close()

    def __enter__(self) -> Enrolment:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def join(folder: Path, text: str, name: str) -> None:
    """Get keys with a token's text, and store them in ``folder``.

    ``name`` is this host's name for itself. Raises ConfigError if the folder has keys, if the host that made the token
    does not listen, if the token has been used, and if it was made for another host.
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
    context.verify_mode = ssl.CERT_NONE  # the certificate is compared with the token's digest instead
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
    """A TLS context with a new certificate, for which only the token vouches, and the certificate's digest."""
    key, name = keys.new_key(), keys.named("penstock enrolment")
    made = keys.certificate(name, name, key.public_key(), 1).sign(key, hashes.SHA256())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with scratch_folder() as folder:
        file = folder / "both.pem"
        keys.write_secret(file, keys.in_pem(key) + made.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(file)
    return context, digest_of(made.public_bytes(serialization.Encoding.DER))


def digest_of(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()[:DIGEST_BYTES]


def pem(request: object) -> bytes:
    return request.public_bytes(serialization.Encoding.PEM)  # type: ignore[attr-defined, no-any-return]


@contextlib.contextmanager
def within(connection: socket.socket) -> Iterator[None]:
    """End the connection after ``EXCHANGE_S`` seconds in the block: a socket's own timeout is only per read."""
    with connection.dup() as handle:
        watch = threading.Timer(EXCHANGE_S, end_exchange, (handle,))
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()


def end_exchange(connection: socket.socket) -> None:
    """Shut a connection down; a thread that reads or writes there gets an error or the end."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def write(sealed: ssl.SSLSocket, message: msgspec.Struct) -> None:
    content = msgspec.msgpack.encode(message)
    sealed.sendall(len(content).to_bytes(4, "little") + content)


def read(sealed: ssl.SSLSocket) -> bytes:
    """A message of the other end. Raises ConnectionError if it ends early or is longer than ``MOST_BYTES``."""
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
