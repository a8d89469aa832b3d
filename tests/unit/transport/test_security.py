"""Who is a member of the cluster, and files that say so or do not."""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from penstock.core import ConfigError
from penstock.transport.addresses import LinkSecurity, on_the_wire, place_of, token_of
from penstock.transport.inbox import Inbox
from penstock.transport.outbox import Outbox
from tests.links import SESSION, SOON, connected, member

YESTERDAY = datetime.now(UTC) - timedelta(days=1)


def wait_for(text: str, caplog: pytest.LogCaptureFixture, inbox: Inbox) -> None:
    deadline = time.monotonic() + SOON
    while text not in caplog.text:
        assert time.monotonic() < deadline
        inbox.wait(time.monotonic() + 0.01)
        assert inbox.take() == []


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.host = member(self.authority, folder / "host")

    def stranger(self, kind: str) -> ssl.SSLContext | None:
        if kind == "plain":
            return None
        if kind == "foreign":
            return self.trusting(member(trustme.CA(), self.folder / "foreign"))
        if kind == "expired":
            return self.trusting(member(self.authority, self.folder / "old", not_after=YESTERDAY))
        context = self.trusting(self.host if kind == "of TLS 1.2" else None)
        if kind == "of TLS 1.2":
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context

    @staticmethod
    def trusting(shown: LinkSecurity | None) -> ssl.SSLContext:
        """Who believes anybody, and shows this."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if shown is None else shown.for_connecting()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("plain", r"--insecure.*\(wrong version number\)"),
        ("without a certificate", "peer did not return a certificate"),
        ("foreign", r"its keys are not those of this cluster \(.*(issuer|self.signed)"),
        ("expired", "certificate has expired"),
        ("of TLS 1.2", "unsupported protocol"),
    ],
)
def test_of_who_is_no_member_nothing_is_taken(
    tmp_path: Path, kind: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Though he knows the session's secret."""
    cluster = Cluster(tmp_path)
    with Inbox(place_of("tcp://127.0.0.1:*"), cluster.host.for_listening()) as inbox:
        inbox.admit(SESSION)
        said = token_of(SESSION) + b"".join(on_the_wire([b"let me in"]))
        with contextlib.suppress(OSError), connected(inbox, said, cluster.stranger(kind)):
            wait_for("refused a connection from 127.0.0.1", caplog, inbox)
        wait_for("refused a connection from 127.0.0.1", caplog, inbox)
        assert re.search(reason, caplog.text)
        assert not inbox._unauthenticated
        assert not inbox._streams


@pytest.mark.parametrize("kind", ["foreign", "plain"])
def test_to_a_receiver_that_is_no_member_not_even_the_token_is_sent(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path)
    foreign = member(trustme.CA(), tmp_path / "foreign")
    with Inbox(place_of("tcp://127.0.0.1:*"), foreign.for_listening() if kind == "foreign" else None) as inbox:
        inbox.admit(SESSION)
        outbox = Outbox(place_of(inbox.address), SESSION, cluster.host.for_connecting())
        outbox.send(b"a prompt")
        refused = f"no connection to {inbox.address.removeprefix('tcp://')}: its keys are not those of this cluster"
        wait_for(refused if kind == "foreign" else "does not begin with", caplog, inbox)
        outbox.close(SOON)
        assert not inbox._streams


def test_members_understand_each_other(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    other = member(cluster.authority, tmp_path / "other")
    with Inbox(place_of("tcp://127.0.0.1:*"), cluster.host.for_listening()) as inbox:
        inbox.admit(SESSION)
        outbox = Outbox(place_of(inbox.address), SESSION, other.for_connecting())
        outbox.send(b"hello")
        found: list[list[bytes]] = []
        while not found:
            inbox.wait(time.monotonic() + SOON)
            found += inbox.take()
        outbox.close()
        assert found == [[b"hello"]]


def locked(key: Path) -> None:
    """A key that asks for a password."""
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    own = load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))


@pytest.mark.parametrize(
    ("file", "damage", "complaint"),
    [
        ("authority", os.unlink, "authority .*: No such file"),
        ("authority", lambda path: Path(path).write_text("nothing"), "authority .*: no certificate or crl found"),
        ("certificate", os.unlink, "certificate .*: No such file"),
        ("key", lambda path: Path(path).write_text("nothing"), "certificate .* with key .*: "),
        ("key", lambda path: trustme.CA().private_key_pem.write_to_path(path), "key values mismatch"),
        ("key", lambda path: locked(Path(path)), "certificate .* with key .*: "),
    ],
)
def test_files_that_do_not_fit_are_named_before_anything_starts(
    tmp_path: Path, file: str, damage: object, complaint: str
) -> None:
    security = Cluster(tmp_path).host
    damage(getattr(security, file))  # type: ignore[operator]
    for make in (security.for_listening, security.for_connecting):
        with pytest.raises(ConfigError, match=complaint):
            make()
