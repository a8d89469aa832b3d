"""The keys of a cluster: made, given to a new host by a token, and checked on every connection."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import platform
import re
import secrets
import select
import socket
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.config import check
from penstock.core import ConfigError
from penstock.files import scratch_folder
from penstock.hosts.placement import host_and_port
from penstock.transport.addresses import LinkSecurity, in_url, place_of, reason_of

# ----------------------------------------------------------------------------------------------------------------- keys
# The keys of a cluster: those of its authority, and the certificate and key that a host shows the others.
#
# A folder holds them. ``authority.pem`` and ``host.pem`` are public; ``authority.key``, which only the host that made
# the cluster has, and ``host.key`` are secret.

AUTHORITY, AUTHORITY_KEY, HOST, HOST_KEY = "authority.pem", "authority.key", "host.pem", "host.key"
FILES: Final = (AUTHORITY, AUTHORITY_KEY, HOST, HOST_KEY)
AUTHORITY_DAYS: Final = 3650
HOST_DAYS: Final = 730
"""Days for which the authority's certificate and those of hosts are valid. A new authority means new keys for all
hosts; a host's keys can be made anew alone."""
EARLIER: Final = timedelta(days=1)
"""A certificate is valid from this long before it was made, since hosts' clocks differ."""

LONGEST_WAIT_S: Final = 3600.0
"""Seconds after which a wait for a new host begins again: the system takes no time that is far longer."""
MOST_NAME: Final = 64
"""Characters of the longest name that a certificate takes."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""The names that hosts have, as `hostname` prints them."""

ANEW: Final = "remove the folder and have this host join anew (`penstock keys add` where the cluster was made)"

PrivateKey = ec.EllipticCurvePrivateKey


def default_folder() -> Path:
    """The folder of the keys if the options name none."""
    configuration = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(configuration) / "penstock" / "keys"


def link_security(folder: Path | None) -> LinkSecurity | None:
    """The keys in a folder, with which this host secures its links. None: those in the default folder, if any.

    Raises ConfigError if a named folder has none.
    """
    place = default_folder() if folder is None else folder
    if not (place / HOST).exists():
        if folder is None:
            return None
        raise ConfigError(f"keys: {folder} holds no keys of a host; `penstock keys` says how to get some")
    check_own(place)
    return LinkSecurity(authority=str(place / AUTHORITY), certificate=str(place / HOST), key=str(place / HOST_KEY))


def check_own(folder: Path) -> None:
    """Raise ConfigError unless this host's certificate is one of the cluster's authority, of its key, and valid today.

    Other hosts would refuse it without an answer, so the error is reported here.
    """
    own, authority = stored_certificate(folder / HOST), stored_certificate(folder / AUTHORITY)
    try:
        own.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        problem = f"keys: {folder / HOST} is no certificate of the authority in {folder / AUTHORITY}; {ANEW}"
        raise ConfigError(problem) from error
    if own_key(folder).public_key() != own.public_key():
        raise ConfigError(f"keys: {folder / HOST_KEY} is not the key of {folder / HOST}; {ANEW}")
    now = datetime.now(UTC)
    for file, one in ((AUTHORITY, authority), (HOST, own)):
        if not one.not_valid_before_utc <= now <= one.not_valid_after_utc:
            dates = f"from {one.not_valid_before_utc:%Y-%m-%d} to {one.not_valid_after_utc:%Y-%m-%d}"
            raise ConfigError(f"keys: {folder / file} is valid {dates}, and today is {now:%Y-%m-%d}; {ANEW}")


def security_for(keys: str | None, insecure: bool) -> LinkSecurity | None:
    """The keys that the options name, as ``link_security`` finds them; None if ``insecure``.

    Raises ConfigError for a named folder without keys, and for keys that are invalid or expired.
    """
    return None if insecure else link_security(None if keys is None else folder_of(keys))


def make_cluster(folder: Path, name: str) -> None:
    """Make a new authority, and keys of this host, called ``name``. Raises ConfigError if the folder has keys."""
    if any((folder / one).exists() for one in FILES):
        raise ConfigError(f"keys: {folder} holds keys already; remove the folder to begin a new cluster")
    key = new_key()
    subject = named("penstock cluster")
    authority = (
        certificate(subject, subject, key.public_key(), AUTHORITY_DAYS)
        # A path of length 0: it signs certificates of hosts, but of no further authority.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    own = new_key()
    signed_own = signed(request_of(own, name), authority, key)
    with all_or_none(folder, FILES):
        write_secret(folder / AUTHORITY_KEY, in_pem(key))
        write_secret(folder / HOST_KEY, in_pem(own))
        (folder / AUTHORITY).write_bytes(pem(authority))
        (folder / HOST).write_bytes(signed_own)


@contextlib.contextmanager
def all_or_none(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Write new files in the folder within the block; if it ends in an error, none of them stays.

    A part of them would be taken for keys, and neither be usable nor let others be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except FileExistsError:  # another command is writing there: the files are its own
        raise
    except BaseException:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        raise


def sign(folder: Path, request: bytes) -> tuple[bytes, bytes]:
    """The authority's certificate, and a new one for a certificate request, all in PEM.

    Raises ConfigError if the folder has no authority with its key, or the request is invalid.
    """
    key, authority = authority_of(folder)
    try:
        asked = x509.load_pem_x509_csr(request)
        if not asked.is_signature_valid:
            raise InvalidSignature
    except (ValueError, InvalidSignature) as error:
        raise ConfigError("keys: what asks for a certificate is no request for one") from error
    return pem(authority), signed(asked, authority, key)


def authority_of(folder: Path) -> tuple[PrivateKey, x509.Certificate]:
    """The cluster's authority and its key. Raises ConfigError unless the folder has both, and they fit."""
    if not (folder / AUTHORITY_KEY).exists() or not (folder / AUTHORITY).exists():
        raise ConfigError(f"keys: {folder} is not where a cluster was made; `penstock keys new` makes one")
    remedy = "restore it, or remove the folder to begin a new cluster"
    key = stored_key(folder / AUTHORITY_KEY, remedy)
    authority = stored_certificate(folder / AUTHORITY, remedy)
    if authority.public_key() != key.public_key():
        raise ConfigError(f"keys: {folder / AUTHORITY_KEY} is not the key of {folder / AUTHORITY}; {remedy}")
    return key, authority


def check_empty(folder: Path) -> None:
    """Raise ConfigError if the folder holds part of a host's keys: nothing there is overwritten."""
    if left := [name for name in (HOST_KEY, AUTHORITY, AUTHORITY_KEY) if (folder / name).exists()]:
        raise ConfigError(f"keys: {folder} holds {left[0]} without {HOST}; remove the folder, then use the token")


def name_in(request: bytes) -> str:
    """The name for which a certificate request asks. Raises ConfigError if the request is invalid."""
    try:
        (name,) = x509.load_pem_x509_csr(request).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError as error:
        raise ConfigError("keys: what asks for a certificate is no request for one") from error
    return str(name.value)


def keep(folder: Path, key: PrivateKey, authority: bytes, own: bytes) -> None:
    """Put a host's keys into its folder. Raises ConfigError if it has some."""
    if (folder / HOST).exists():
        raise ConfigError(f"keys: {folder} holds keys already; remove the folder to join another cluster")
    with all_or_none(folder, (HOST_KEY, AUTHORITY, HOST)):
        write_secret(folder / HOST_KEY, in_pem(key))
        (folder / AUTHORITY).write_bytes(authority)
        (folder / HOST).write_bytes(own)  # last: it marks a folder whose keys are complete


def new_key() -> PrivateKey:
    """A new private key on the curve P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def request_of(key: PrivateKey, name: str) -> x509.CertificateSigningRequest:
    """A request for a certificate of the host called ``name``."""
    return x509.CertificateSigningRequestBuilder().subject_name(named(name)).sign(key, hashes.SHA256())


def signed(request: x509.CertificateSigningRequest, authority: x509.Certificate, key: PrivateKey) -> bytes:
    """A host's certificate: for both ends of a link, not for signing. The request contributes only name and key."""
    both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    made = (
        certificate(request.subject, authority.subject, request.public_key(), HOST_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage(signs=False), critical=True)
        .add_extension(both_ends, critical=False)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


def certificate(subject: x509.Name, issuer: x509.Name, key: object, days: int) -> x509.CertificateBuilder:
    """A certificate of ``key``, valid for ``days``, to which extensions and the issuer's signature are added."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)  # type: ignore[arg-type]  # of any kind that X.509 knows
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)  # type: ignore[arg-type]
    )


def usage(*, signs: bool) -> x509.KeyUsage:
    """The permitted use of a key: an authority's signs certificates, a host's proves who it is."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def own_name() -> str:
    """This host's name. Raises ConfigError if it has none that fits into a certificate."""
    name = platform.node()
    if not 1 <= len(name) <= MOST_NAME:
        raise ConfigError(f"keys: this host calls itself {name!r}; set a name of 1 to {MOST_NAME} characters")
    return name


def named(name: str) -> x509.Name:
    """An X.509 name that is nothing but a common name, of 1 to ``MOST_NAME`` characters."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def stored_key(file: Path, remedy: str) -> PrivateKey:
    """The private key in a file. Raises ConfigError, with the ``remedy``, if it cannot be read or holds none."""
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"keys: {file}: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm):  # no PEM, with a password, of a kind that nobody knows
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"keys: {file} cannot be read as a key; {remedy}")
    return key


def stored_certificate(file: Path, remedy: str = ANEW) -> x509.Certificate:
    """The certificate in a file. Raises ConfigError, with the ``remedy``, if it cannot be read or holds none."""
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"keys: {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"keys: {file} cannot be read as a certificate; {remedy}") from error


def in_pem(key: PrivateKey) -> bytes:
    """A private key in PEM (PKCS #8), not encrypted: the file's rights protect it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write_secret(file: Path, content: bytes) -> None:
    """A new file that only its owner can read."""
    # The rights are those of its creation, so that there is no moment at which others could open it.
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(content)


# ------------------------------------------------------------------------------------------------------------ enrolment
# Gives a new host its keys: with a token that works once, from the host that has the cluster's authority.
#
#     authority's host                                          the new host
#     listens, shows a certificate made for the occasion
#     prints a token: its address, the certificate's digest, a secret
#                                                               makes its own key
#             <--------------- TLS: it is the token's certificate ----------------
#             <--------------- the secret, a request for a certificate ----------
#             ---------------- the authority's certificate, the host's own ------>
#     listens no more
#
# The new host's private key never leaves it, and nobody without the token learns or gets anything.

EXCHANGE_S: Final = 10.0
"""Seconds that a whole exchange may take, however slowly the other end sends. A longer time lets strangers hold
connections, of which there are ``MOST_CONNECTIONS``."""
MOST_CONNECTIONS: Final = 16
"""Most connections that are served at a time. Beyond them the oldest is ended, so that strangers hold nobody up."""
MOST_BYTES: Final = 1 << 14
"""Most bytes of a message of either end. Certificates and requests take a few thousand."""
DIGEST_BYTES: Final = 16
"""Bytes of a certificate's digest in a token: 128 bits, which no search can match."""
SECRET_BYTES: Final = 16
"""Bytes of a token's secret: 128 bits, which nobody can guess."""


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
    """A new host's message: the token's secret, and its request for a certificate in PEM."""

    secret: bytes
    request: bytes


class Membership(msgspec.Struct, tag="membership", frozen=True):
    """The answer to it: the authority's certificate and the host's own, in PEM."""

    authority: bytes
    certificate: bytes


class Refusal(msgspec.Struct, tag="refusal", frozen=True):
    """The answer to a host that the token was not made for: ``name`` can still use it."""

    name: str


class Enrolment:
    """Listens for one new host, which calls itself ``name``. Raises ConfigError if the folder has no authority."""

    def __init__(self, folder: Path, name: str, address: str) -> None:
        self._folder = folder
        self._name = name
        sign(folder, pem(request_of(new_key(), name)))  # on trial: raises now if it cannot sign
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
            ready, _, _ = select.select([self._listener, self._woken], [], [], min(left, LONGEST_WAIT_S))
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
        """Give the other end its keys if it knows the token's secret and has the right name."""
        with self._context.wrap_socket(connection, server_side=True) as sealed:
            asked = msgspec.msgpack.decode(read(sealed), type=Application)
            if not hmac.compare_digest(asked.secret, self.token.secret):
                return  # without an answer: a stranger learns nothing
            if not is_called(name_in(asked.request), self._name):
                write(sealed, Refusal(self._name))
                return
            with self._once:  # if two connections have the token, one of them gets keys
                if self._joined.is_set():
                    return
                authority, own = sign(self._folder, asked.request)
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
    if (folder / HOST).exists():
        raise ConfigError(f"keys: {folder} holds keys already, with which this host is a member; leave the token out")
    check_empty(folder)
    key = new_key()
    try:
        told = asked_for_membership(token, pem(request_of(key, name)))
    except (OSError, msgspec.MsgspecError) as error:
        reason = reason_of(error)
        raise ConfigError(f"token: {token.address}: {reason}; a token works once, while its command runs") from error
    if isinstance(told, Refusal):
        raise ConfigError(
            f"token: it was made for {told.name}, and this host calls itself {name}; `penstock keys add {name}` makes "
            "one for it"
        )
    keep(folder, key, told.authority, told.certificate)


def is_called(name: str, made_for: str) -> bool:
    """Whether a host's name is the one that a token was made for, which may leave the domain out."""
    first, second = (one.casefold().partition(".") for one in (name, made_for))
    return first[0] == second[0] and (not (first[2] and second[2]) or first[2] == second[2])


def asked_for_membership(token: Token, request: bytes) -> Membership | Refusal:
    """The answer to ``request``. Raises ConfigError if another listens there than the token's maker, and OSError."""
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
        # The new host knows no authority yet. The digest takes its place: only the token's maker has the key to it.
        if not hmac.compare_digest(digest_of(shown), token.digest):
            raise ConfigError(f"token: who listens at {token.address} has not made it")
        write(sealed, Application(token.secret, request))
        answer: Membership | Refusal = msgspec.msgpack.decode(read(sealed), type=Membership | Refusal)  # type: ignore[call-overload]
        return answer


def throwaway_certificate() -> tuple[ssl.SSLContext, bytes]:
    """A TLS context with a new certificate, for which only the token vouches, and the certificate's digest."""
    key, name = new_key(), named("penstock enrolment")
    made = certificate(name, name, key.public_key(), 1).sign(key, hashes.SHA256())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with scratch_folder() as folder:
        file = folder / "both.pem"
        write_secret(file, in_pem(key) + made.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(file)
    return context, digest_of(made.public_bytes(serialization.Encoding.DER))


def digest_of(certificate: bytes) -> bytes:
    """The first ``DIGEST_BYTES`` bytes of a certificate's SHA-256; ``certificate`` is in DER."""
    return hashlib.sha256(certificate).digest()[:DIGEST_BYTES]


def pem(request: object) -> bytes:
    """A certificate or a request for one in PEM."""
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
    """Send a message: its length in four bytes, then its msgpack."""
    content = msgspec.msgpack.encode(message)
    sealed.sendall(len(content).to_bytes(4, "little") + content)


def read(sealed: ssl.SSLSocket) -> bytes:
    """A message of the other end. Raises ConnectionError if it ends early or is longer than ``MOST_BYTES``."""
    length = int.from_bytes(exactly(sealed, 4), "little")
    if length > MOST_BYTES:
        raise ConnectionError("it says too much")
    return exactly(sealed, length)


def exactly(sealed: ssl.SSLSocket, count: int) -> bytes:
    """The next ``count`` bytes. Raises ConnectionError if the other end hangs up before."""
    came = b""
    while len(came) < count:
        more = sealed.recv(count - len(came))
        if not more:
            raise ConnectionError("it has hung up")
        came += more
    return came


# ----------------------------------------------------------------------------------------------------------- membership
# The commands ``penstock keys``: new and add; request, sign and accept, for hosts between which text is carried.
#
#     ssh HOST penstock keys request | penstock keys sign | ssh HOST penstock keys accept


def folder_of(keys: str | None) -> Path:
    """The folder of the keys that an option names; the default folder for None. Raises FieldError for an empty text."""
    check(keys != "", "keys", keys, "a folder, or left out")
    return default_folder() if keys is None else Path(keys).expanduser()


def new_cluster(keys: str | None) -> None:
    """Make a new cluster's keys. Raises ConfigError if there are keys already."""
    folder = folder_of(keys)
    make_cluster(folder, own_name())
    print(f"This host is the first of a new cluster; its keys are in {folder}.")


def add_host(name: str, listen: str, minutes: float, keys: str | None) -> None:
    """Print a token for a new host, and wait for it. Raises ConfigError without an authority, and if it is late."""
    check(minutes > 0, "minutes", minutes, "above 0")
    fits = len(name) <= MOST_NAME and NAME.fullmatch(name) is not None
    check(fits, "host", name, f"what `hostname` prints there: at most {MOST_NAME} letters, digits, '.', '-' and '_'")
    at, port = host_and_port(listen, "listen", least_port=0)
    address = f"{at if at.startswith('[') else in_url(at)}:{port or 0}"
    try:
        enrolment = Enrolment(folder_of(keys), name, address)
    except OSError as error:
        raise ConfigError(f"listen: {listen}: {error.strerror}") from error
    with enrolment:
        print(f"On the host that calls itself {name} (`hostname`), within {minutes:g} minutes:\n")
        print(f"  penstock worker --listen ADDRESS:7700 --token {enrolment.token}\n")
        print(f"ADDRESS is that of {name} at which other hosts reach it.", flush=True)  # the wait begins, in a pipe too
        if not enrolment.serve(60 * minutes):
            raise ConfigError(f"keys: {name} has not come within {minutes:g} minutes; its token is void now")
    print(f"{name} has its keys.")


def request_membership(keys: str | None) -> None:
    """Make this host's key, and print a request for a certificate of it; print none where it is a member already.

    Asked again before an answer has come, it prints a request for the same key.
    """
    folder, name = folder_of(keys), own_name()
    if (folder / HOST).exists():
        print(f"This host is a member already, with the keys in {folder}.", file=sys.stderr)
        return
    if (folder / HOST_KEY).exists():
        key = own_key(folder)
    else:
        check_empty(folder)
        key = new_key()
        with all_or_none(folder, (HOST_KEY,)):
            write_secret(folder / HOST_KEY, in_pem(key))
    print(pem(request_of(key, name)).decode(), end="")


def membership_for(request: bytes, keys: str | None) -> bytes:
    """The answer to a host's request: the authority's certificate and the host's own, in PEM.

    Raises ConfigError for an empty request, one that is none, and where this host has no authority.
    """
    if not request.strip():
        raise ConfigError("keys: no request came; a host that is a member already makes none")
    return b"".join(sign(folder_of(keys), request))


def accept_membership(answer: bytes, keys: str | None) -> None:
    """Keep what ``membership_for`` has answered. Raises ConfigError if it is none, or no answer to this host."""
    folder = folder_of(keys)
    if (folder / HOST).exists():
        raise ConfigError(f"keys: {folder} holds keys already; remove the folder to join another cluster")
    if not (folder / HOST_KEY).exists():
        raise ConfigError("keys: this host has asked for nothing; `penstock keys request` does")
    key = own_key(folder)
    try:
        authority, own = x509.load_pem_x509_certificates(answer)
        own.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise ConfigError("keys: this is no answer of `penstock keys sign`") from error
    if own.public_key() != key.public_key():
        raise ConfigError("keys: this answers another host's request, or an earlier one")
    encoding = serialization.Encoding.PEM
    with all_or_none(folder, (AUTHORITY, HOST)):  # the key stays, whose request has been answered
        (folder / AUTHORITY).write_bytes(authority.public_bytes(encoding))
        (folder / HOST).write_bytes(own.public_bytes(encoding))  # last: it marks a folder whose keys are complete


def own_key(folder: Path) -> PrivateKey:
    """The key that this host has made. Raises ConfigError if the file holds none."""
    return stored_key(folder / HOST_KEY, ANEW)
