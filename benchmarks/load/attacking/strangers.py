"""Those who reach a cluster's ports: keys of every wrong kind, and connections that never become one.

    python -m benchmarks.load.attacking.strangers ADDRESS KEYS KIND SESSION

A process on the host of the stranger (``Crowd``) makes ``CROWD`` connections of one kind to ADDRESS, says that they
are made, holds them until its input ends, and prints how many the other end has closed and how many it has answered.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from penstock.hosts import keys
from penstock.transport.addresses import FRAME, MAX_FRAME_BYTES, LinkSecurity, on_the_wire, token_of

CROWD: Final = 250
"""Connections that are made at once: four times the most that an inbox keeps without a token."""
PATIENCE_S: Final = 10.0
"""Seconds that a connection is given to be refused."""
DAY: Final = timedelta(days=1)

# ----------------------------------------------------------------------------------------------------------------- keys
# Each certificate bears an honest host's name. It is wrong in its issuer, signature, dates or use.


def authority_in(folder: Path) -> tuple[x509.Certificate, keys.PrivateKey]:
    key = serialization.load_pem_private_key((folder / keys.AUTHORITY_KEY).read_bytes(), None)
    return x509.load_pem_x509_certificate((folder / keys.AUTHORITY).read_bytes()), key  # type: ignore[return-value]


def issued(
    own: keys.PrivateKey,
    issuer: x509.Certificate,
    key: keys.PrivateKey,
    days: tuple[int, int] = (-1, 1),
    use: Sequence[x509.ObjectIdentifier] = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
) -> x509.Certificate:
    """A host's certificate, valid from and to so many days from now."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(keys.named("host"))
        .issuer_name(issuer.subject)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + days[0] * DAY)
        .not_valid_after(now + days[1] * DAY)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(keys.usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(use), critical=False)
        .sign(key, hashes.SHA256())
    )


def wrong_keys(cluster: Path, folder: Path) -> dict[str, LinkSecurity]:
    """Keys that no member of the cluster may accept, by kind, written into ``folder``."""
    authority, key = authority_in(cluster)
    member = x509.load_pem_x509_certificate((cluster / keys.HOST).read_bytes())
    own, foreign_key, member_key = keys.new_key(), keys.new_key(), keys.own_key(cluster)
    keys.make_cluster(folder / "other", "host")
    other, other_key = authority_in(folder / "other")
    one_use = {"for connecting": ExtendedKeyUsageOID.CLIENT_AUTH, "for listening": ExtendedKeyUsageOID.SERVER_AUTH}
    made = {
        "another cluster's": [issued(own, other, other_key)],
        "another cluster's, with its authority": [issued(own, other, other_key), other],
        "the authority's name on another key": [issued(own, authority, foreign_key)],
        "its own": [issued(own, member, own)],
        "a member's": [issued(own, member, member_key), member],
        "expired": [issued(own, authority, key, (-20, -10))],
        "not yet valid": [issued(own, authority, key, (10, 20))],
        **{name: [issued(own, authority, key, use=[use])] for name, use in one_use.items()},
    }
    (folder / "own.key").write_bytes(keys.in_pem(own))
    (folder / "authority.pem").write_bytes((cluster / keys.AUTHORITY).read_bytes())
    for number, chain in enumerate(made.values()):
        pem = b"".join(one.public_bytes(serialization.Encoding.PEM) for one in chain)
        (folder / f"{number}.pem").write_bytes(pem)
    return {
        kind: LinkSecurity(
            authority=str(folder / "authority.pem"),
            certificate=str(folder / f"{number}.pem"),
            key=str(folder / "own.key"),
        )
        for number, kind in enumerate(made)
    }


# ---------------------------------------------------------------------------------------------------------- connections


def sealed(connection: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
    return context.wrap_socket(connection, server_hostname=None)


def nameless() -> ssl.SSLContext:
    """A client that checks nothing and shows no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def hello(context: ssl.SSLContext) -> bytes:
    """The first bytes that a client sends."""
    came, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(came, leaving).do_handshake()
    return leaving.read()


def message(session: str) -> list[bytes]:
    """A connection's token and a message of one frame, which says nothing that anybody knows."""
    return [token_of(session), *(bytes(part) for part in on_the_wire([b"\xc0"]))]


def unsealed(*parts: bytes) -> Callable[[socket.socket], socket.socket]:
    def send(connection: socket.socket) -> socket.socket:
        connection.sendall(b"".join(parts))
        return connection

    return send


def with_keys(context: ssl.SSLContext, *parts: bytes) -> Callable[[socket.socket], socket.socket]:
    def send(connection: socket.socket) -> socket.socket:
        over = sealed(connection, context)
        over.sendall(b"".join(parts))
        return over

    return send


def kinds(security: LinkSecurity, session: str) -> dict[str, Callable[[socket.socket], socket.socket]]:
    """The bytes that a connection sends, by kind. ``security`` is a member's.

    ``session`` is the one that the port admits, where strangers may know it.
    """
    member = security.for_connecting()
    first = hello(member)
    return {
        "silent": unsealed(),
        "noise": unsealed(bytes(range(256)) * 8),
        "HTTP": unsealed(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        "a message without TLS": unsealed(*message(session)),
        "half a hello": unsealed(first[: len(first) // 2]),
        "a hello": unsealed(first),
        "TLS without a certificate": with_keys(nameless(), *message(session)),
        "a member, silent": with_keys(member),
        "a member, half a token": with_keys(member, token_of(session)[:16]),
        "a member, a wrong token": with_keys(member, *message("nobody's")),
        "a member, half a frame": with_keys(member, token_of(session), FRAME.pack(1000, False), b"x"),
        "a member, a frame too long": with_keys(member, token_of(session), FRAME.pack(MAX_FRAME_BYTES + 1, False)),
    }


def opened(address: str, send: Callable[[socket.socket], socket.socket]) -> socket.socket | None:
    """A connection that has sent its bytes, or None where the other end refused them at once.

    Raises TimeoutError if the other end does not go on.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    try:
        return send(connection)
    except TimeoutError:
        raise
    except OSError:  # SSLError is one
        connection.close()
        return None


def outcome(connection: socket.socket | None, seconds: float) -> str:
    """``refused``, ``held`` if it is still open after so many seconds, or ``answered``.

    Bytes in the clear are TLS's own, of a handshake or an alert. What TLS has deciphered would be an answer.
    """
    if connection is None:
        return "refused"
    with connection:
        connection.settimeout(seconds)
        try:
            while connection.recv(1 << 16):
                if isinstance(connection, ssl.SSLSocket):
                    return "answered"
        except TimeoutError:
            return "held"
        except OSError:
            pass
        return "refused"


def replayed(address: str, security: LinkSecurity, session: str) -> str:
    """The end of a connection that sends the bytes of an honest one once more."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    came, leaving, said = ssl.MemoryBIO(), ssl.MemoryBIO(), b""
    over = security.for_connecting().wrap_bio(came, leaving)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        shaken = False
        while not shaken:
            try:
                over.do_handshake()
                shaken = True
            except ssl.SSLWantReadError:
                pass
            said += (reply := leaving.read())
            connection.sendall(reply)
            if not shaken:
                came.write(connection.recv(1 << 16))
        over.write(b"".join(message(session)))
        said += (reply := leaving.read())
        connection.sendall(reply)
    return outcome(opened(address, unsealed(said)), PATIENCE_S)


class Crowd:
    """``CROWD`` connections of one kind from another host."""

    def __init__(self, before: Sequence[str], address: str, cluster: str, kind: str, session: str) -> None:
        words = [sys.executable, "-m", __name__, address, cluster, kind, session]
        self._process = subprocess.Popen([*before, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.made = threading.Event()
        """Whether all connections have sent what they have to say."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self.made.set()

    def end(self) -> dict[str, int]:
        """How many were refused, held and answered, once they have been closed."""
        self._reader.join()
        told, _ = self._process.communicate()
        found: dict[str, int] = json.loads(told)
        return found


@contextmanager
def crowd(*arguments: Any) -> Iterator[Crowd]:
    """A crowd that is gone at the end of the block, whatever happens in it."""
    made = Crowd(*arguments)
    try:
        yield made
    finally:
        made._process.kill()
        made._process.wait()


def main(address: str, cluster: str, kind: str, session: str) -> None:
    security = keys.security_for(cluster, insecure=False)
    assert security is not None
    send = kinds(security, session)[kind]
    connections = [opened(address, send) for _ in range(CROWD)]
    print("made", flush=True)
    sys.stdin.read()
    found = [outcome(one, 0.05) for one in connections]
    print(json.dumps({name: found.count(name) for name in ("refused", "held", "answered")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
