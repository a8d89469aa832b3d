"""The keys of a cluster: those of its authority, and the certificate and key that a host shows the others.

A folder holds them. ``authority.pem`` and ``host.pem`` are public; ``authority.key``, which only the host that made the
cluster has, and ``host.key`` are secret.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.core import ConfigError
from penstock.transport.security import LinkSecurity

AUTHORITY, AUTHORITY_KEY, HOST, HOST_KEY = "authority.pem", "authority.key", "host.pem", "host.key"
AUTHORITY_DAYS: Final = 3650
HOST_DAYS: Final = 730
EARLIER: Final = timedelta(days=1)
"""A certificate is valid from this long before it was made, since hosts' clocks differ."""

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
    if not (place / HOST).is_file():
        if folder is None:
            return None
        raise ConfigError(f"keys: {folder} holds no keys of a host; `penstock keys` says how to get some")
    check_own(place)
    return LinkSecurity(authority=str(place / AUTHORITY), certificate=str(place / HOST), key=str(place / HOST_KEY))


def check_own(folder: Path) -> None:
    """Raise ConfigError unless this host's certificate is one of the cluster's authority, and valid today.

    Other hosts would refuse it without an answer, so the error is reported here.
    """
    try:
        own = x509.load_pem_x509_certificate((folder / HOST).read_bytes())
        authority = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
        own.verify_directly_issued_by(authority)
    except OSError as error:
        raise ConfigError(f"keys: {error.filename}: {error.strerror}") from error
    except (ValueError, TypeError, InvalidSignature) as error:
        problem = f"keys: {folder / HOST} is no certificate of the authority in {folder / AUTHORITY}; {ANEW}"
        raise ConfigError(problem) from error
    now = datetime.now(UTC)
    for file, one in ((AUTHORITY, authority), (HOST, own)):
        if not one.not_valid_before_utc <= now <= one.not_valid_after_utc:
            dates = f"from {one.not_valid_before_utc:%Y-%m-%d} to {one.not_valid_after_utc:%Y-%m-%d}"
            raise ConfigError(f"keys: {folder / file} is valid {dates}, and today is {now:%Y-%m-%d}; {ANEW}")


def security_for(keys: str | None, insecure: bool) -> LinkSecurity | None:
    """The keys that the options name, as ``link_security`` finds them; None if ``insecure``. Raises ConfigError."""
    return None if insecure else link_security(None if keys is None else Path(keys).expanduser())


def make_cluster(folder: Path, name: str) -> None:
    """Make a new authority, and keys of this host, called ``name``. Raises ConfigError if the folder has keys."""
    if (folder / AUTHORITY).exists():
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
    folder.mkdir(parents=True, exist_ok=True)
    write_secret(folder / AUTHORITY_KEY, in_pem(key))
    write_secret(folder / HOST_KEY, in_pem(own))
    (folder / HOST).write_bytes(signed(request_of(own, name), authority, key))
    (folder / AUTHORITY).write_bytes(authority.public_bytes(serialization.Encoding.PEM))


def sign(folder: Path, request: bytes) -> tuple[bytes, bytes]:
    """The authority's certificate, and a new one for a certificate request, all in PEM.

    Raises ConfigError if the folder has no authority's key, or the request is invalid.
    """
    try:
        key = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
        pem = (folder / AUTHORITY).read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"keys: {folder} is not where a cluster was made; `penstock keys new` makes one") from error
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    try:
        asked = x509.load_pem_x509_csr(request)
        if not asked.is_signature_valid:
            raise InvalidSignature
    except (ValueError, InvalidSignature) as error:
        raise ConfigError("keys: what asks for a certificate is no request for one") from error
    return pem, signed(asked, x509.load_pem_x509_certificate(pem), key)


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
    folder.mkdir(parents=True, exist_ok=True)
    write_secret(folder / HOST_KEY, in_pem(key))
    (folder / AUTHORITY).write_bytes(authority)
    (folder / HOST).write_bytes(own)  # last: it marks a folder whose keys are complete


def new_key() -> PrivateKey:
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


def named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def in_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write_secret(file: Path, content: bytes) -> None:
    """A new file that only its owner can read."""
    # The rights are those of its creation, so that there is no moment at which others could open it.
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(content)
