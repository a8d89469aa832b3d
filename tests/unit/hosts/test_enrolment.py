"""A host gets its keys with a token: once, in time, and of nobody but who made it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import platform
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from penstock.core import ConfigError
from penstock.hosts import keys
from penstock.hosts.keys import (
    AUTHORITY,
    AUTHORITY_KEY,
    HOST,
    HOST_KEY,
    Enrolment,
    Token,
    add_host,
    is_called,
    join,
    link_security,
    make_cluster,
    new_cluster,
    new_key,
    pem,
    request_membership,
    request_of,
    sign,
    token_of,
)
from penstock.hosts.worker import run_worker
from penstock.transport.addresses import LinkSecurity
from penstock.transport.outbox import Sockets
from tests.links import SESSION, received
from tests.terminals import PENSTOCK

SOON = 20.0


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The keys of a cluster's first host."""
    folder = tmp_path / "first"
    make_cluster(folder, "first")
    return folder


def serving(apart: ThreadPoolExecutor, folder: Path, seconds: float = SOON) -> tuple[Enrolment, Future[bool]]:
    made = Enrolment(folder, "second", "127.0.0.1:0")
    return made, apart.submit(made.serve, seconds)


def reached(one: LinkSecurity, other: LinkSecurity) -> bool:
    """Whether a message of one host arrives at the other."""
    with Sockets(one) as here, Sockets(other) as there, there.inbox("tcp://127.0.0.1:*") as inbox:
        inbox.admit(SESSION)
        here.connect(inbox.address, SESSION).send(b"hello")
        return received(inbox, 1) == [[b"hello"]]


def security_of(folder: Path) -> LinkSecurity:
    found = link_security(folder)
    assert found is not None
    return found


def test_who_has_the_token_becomes_a_member(first: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    with ThreadPoolExecutor(1) as apart:
        made, served = serving(apart, first)
        with made:
            join(second, str(made.token), "second")
            assert served.result()
    assert reached(security_of(first), security_of(second))
    assert reached(security_of(second), security_of(first))
    assert sorted(os.listdir(second)) == ["authority.pem", "host.key", "host.pem"]


def test_a_token_works_once(first: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as apart:
        made, served = serving(apart, first)
        with made:
            join(tmp_path / "second", str(made.token), "second")
            assert served.result()
        with pytest.raises(ConfigError, match="a token works once"):
            join(tmp_path / "third", str(made.token), "third")
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("192.0.2.1:7700", "listen is '192.0.2.1:7700': .* a free ADDRESS:PORT of this host"),
        ("a:b:c", "listen names 'a:b:c'; a host is HOST or HOST:PORT"),
    ],
)
def test_a_worker_that_cannot_listen_leaves_its_token_to_be_used(
    listen: str, said: str, first: Path, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    with ThreadPoolExecutor(1) as apart:
        made, served = serving(apart, first)
        with made:
            with pytest.raises(ConfigError, match=said):
                run_worker(listen, None, str(second), str(made.token), False, None, 1.0, False)
            assert not second.exists()
            join(second, str(made.token), "second")
            assert served.result()


@pytest.mark.parametrize(
    ("name", "fits"),
    [("second", True), ("SECOND", True), ("second.lan", True), ("third", False), ("second2", False), ("", False)],
)
def test_a_token_is_for_the_host_that_it_was_made_for(first: Path, tmp_path: Path, name: str, fits: bool) -> None:
    """Another one is told so, and leaves it to be used."""
    assert not is_called("second.lan", "second.org")
    with ThreadPoolExecutor(1) as apart:
        made, served = serving(apart, first)
        with made:
            if not fits:
                with pytest.raises(ConfigError, match=f"it was made for second, and this host calls itself {name}"):
                    join(tmp_path / "other", str(made.token), name or "-")
                assert not (tmp_path / "other").exists()
            join(tmp_path / "second", str(made.token), name if fits else "second")
            assert served.result()


def test_another_secret_gets_nothing_and_uses_nothing_up(first: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as apart:
        made, served = serving(apart, first)
        with made:
            guessed = Token(made.token.address, made.token.digest, b"0" * 16)
            with pytest.raises(ConfigError, match="hung up"):
                join(tmp_path / "stranger", str(guessed), "stranger")
            join(tmp_path / "second", str(made.token), "second")
            assert served.result()


def dribble(address: str, first: bytes, ended: threading.Event) -> None:
    """Send a byte now and then, for ever, so that each single read of the other end is in time."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection, contextlib.suppress(OSError):
        connection.settimeout(0.02)
        connection.sendall(first)
        while True:
            connection.sendall(b"\x00")
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1):
                    break
    ended.set()


TLS_HEAD = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc"
"""The beginning of a handshake that announces 16 KiB."""


def test_strangers_who_dribble_hold_nobody_up(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than are heard at a time, before and in a handshake: the honest host enrols, and each is ended."""
    monkeypatch.setattr(keys, "MOST_CONNECTIONS", 4)
    ended = [threading.Event() for _ in range(6)]
    with ThreadPoolExecutor(7) as apart:
        made, served = serving(apart, first)
        with made:
            for number, event in enumerate(ended):
                apart.submit(dribble, made.token.address, TLS_HEAD[: 9 * (number % 2)], event)
            assert all(event.wait(SOON) for event in ended[:2]), "the first ones give way to the last ones"
            join(tmp_path / "second", str(made.token), "second")
            assert served.result()
            assert all(event.wait(SOON) for event in ended)


@pytest.mark.parametrize("first_bytes", [b"", TLS_HEAD])
def test_an_exchange_has_a_deadline_however_it_is_spread(
    first: Path, monkeypatch: pytest.MonkeyPatch, first_bytes: bytes
) -> None:
    monkeypatch.setattr(keys, "EXCHANGE_S", 0.5)
    ended = threading.Event()
    with ThreadPoolExecutor(2) as apart:
        made, served = serving(apart, first, seconds=600.0)
        with made:
            apart.submit(dribble, made.token.address, first_bytes, ended)
            assert ended.wait(SOON)
            made._joined.set()
            made._waker.send(b"!")
            assert served.result()


@contextmanager
def keys_add(folder: Path, minutes: float) -> Iterator[tuple[subprocess.Popen[str], Token]]:
    """The command ``penstock keys add second``, and the token that it has printed."""
    command = [PENSTOCK, "keys", "add", "second", "--listen", "127.0.0.1", "--keys", str(folder)]
    command += ["--minutes", str(minutes)]
    # Into a pipe, as into `tee`: without PYTHONUNBUFFERED Python would keep the token back until the command ends.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "--token" in line)
            yield process, token_of(line.split("--token ")[1])
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("first_bytes", "comes"),
    [
        (b"", True),
        (TLS_HEAD, False),
        *(pytest.param(*one, marks=pytest.mark.whole) for one in ((TLS_HEAD, True), (b"", False))),
    ],
)
def test_the_command_has_its_minutes_in_all_beside_a_stranger_who_dribbles(
    first: Path, tmp_path: Path, first_bytes: bytes, comes: bool
) -> None:
    """The host that it waits for gets in beside the stranger; without that host it ends when its minutes are over."""
    ended, minutes = threading.Event(), 15.0 if comes else 0.1
    with ThreadPoolExecutor(1) as apart, keys_add(first, minutes) as (process, token):
        stranger = apart.submit(dribble, token.address, first_bytes, ended)
        if comes:
            join(tmp_path / "second", str(token), "second")
        said, problem = process.communicate(timeout=SOON)
        assert ended.wait(SOON)
        stranger.result()
    if comes:
        assert (process.returncode, problem) == (0, "")
        assert "second has its keys" in said
        assert reached(security_of(first), security_of(tmp_path / "second"))
    else:
        assert process.returncode == 2
        assert "has its keys" not in said
        assert problem == "penstock: error: keys: second has not come within 0.1 minutes; its token is void now\n"


def test_a_host_that_joins_waits_for_no_endless_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "EXCHANGE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as apart:
        token = Token(f"127.0.0.1:{listener.getsockname()[1]}", b"0" * 16, b"0" * 16)

        def answer_slowly() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"\x16\x03\x03\x40\x00")
                while True:
                    connection.sendall(b"\x00")
                    time.sleep(0.02)

        apart.submit(answer_slowly)
        with pytest.raises(ConfigError, match=f"token: {token.address}: "):
            join(tmp_path / "second", str(token), "second")


def test_nothing_is_said_to_who_has_not_made_the_token(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    monkeypatch.setattr(keys, "write", lambda sealed, message: said.append(message))
    with ThreadPoolExecutor(1) as apart:
        made, served = serving(apart, first, seconds=1.0)
        with made:
            impostor = Token(made.token.address, b"0" * 16, made.token.secret)
            with pytest.raises(ConfigError, match="has not made it"):
                join(tmp_path / "second", str(impostor), "second")
            assert not served.result()
    assert said == []


@pytest.mark.parametrize("text", ["", "a:1", "a:1/short", "/" + "A" * 43, "a:1/" + "!" * 43])
def test_what_is_no_token(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token: this is none"):
        join(tmp_path, text, "x")


def test_tokens_are_read_as_they_are_printed() -> None:
    token = Token("[::1]:7799", bytes(range(16)), bytes(range(16, 32)))
    assert token_of(f" {token}\n") == token


def test_secrets_are_their_owners_alone(first: Path) -> None:
    for name in (AUTHORITY_KEY, HOST_KEY):
        assert stat.S_IMODE((first / name).stat().st_mode) == 0o600


def test_keys_are_not_written_over(first: Path) -> None:
    before = (first / HOST).read_bytes()
    with pytest.raises(ConfigError, match="holds keys already"):
        make_cluster(first, "again")
    with pytest.raises(ConfigError, match="holds keys already"):
        join(first, str(Token("127.0.0.1:1", b"0" * 16, b"0" * 16)), "again")
    assert (first / HOST).read_bytes() == before


@pytest.mark.parametrize("left", [HOST_KEY, AUTHORITY])
def test_a_part_of_keys_spends_no_token(first: Path, tmp_path: Path, left: str) -> None:
    second = tmp_path / "second"
    second.mkdir()
    (second / left).write_bytes((first / left).read_bytes())
    with ThreadPoolExecutor(1) as apart:
        made, served = serving(apart, first)
        with made:
            with pytest.raises(ConfigError, match=f"holds {left} without host.pem; remove the folder, then use the"):
                join(second, str(made.token), "second")
            (second / left).unlink()
            join(second, str(made.token), "second")
            assert served.result()


def changed_dates(folder: Path, days: tuple[int, int]) -> None:
    """This host's certificate, signed by the same authority, valid from so many days from now to so many."""
    authority = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
    signing = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
    own = serialization.load_pem_private_key((folder / HOST_KEY).read_bytes(), None)
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(authority.subject)
        .issuer_name(authority.subject)
        .public_key(own.public_key())
        .serial_number(1)
        .not_valid_before(now + timedelta(days=days[0]))
        .not_valid_after(now + timedelta(days=days[1]))
        .sign(signing, hashes.SHA256())  # type: ignore[arg-type]
    )
    (folder / HOST).write_bytes(made.public_bytes(serialization.Encoding.PEM))


@pytest.mark.parametrize("days", [(-9, -1), (1, 9)])
def test_a_certificate_of_another_day_is_named(first: Path, days: tuple[int, int]) -> None:
    changed_dates(first, days)
    with pytest.raises(ConfigError, match=r"host\.pem is valid from .* to .*, and today is .*; remove the folder and"):
        link_security(first)


def test_a_certificate_of_another_cluster_is_named(first: Path, tmp_path: Path) -> None:
    make_cluster(tmp_path / "other", "other")
    (first / AUTHORITY).write_bytes((tmp_path / "other" / AUTHORITY).read_bytes())
    with pytest.raises(ConfigError, match=r"host\.pem is no certificate of the authority in .*authority\.pem; remove"):
        link_security(first)


def rsa_key() -> bytes:
    key = rsa.generate_private_key(65537, 2048)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def locked_key() -> bytes:
    encrypted = serialization.BestAvailableEncryption(b"secret")
    return new_key().private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encrypted)


READERS: Final[dict[str, Callable[[Path], object]]] = {
    "worker": link_security,
    "keys add": lambda folder: Enrolment(folder, "second", "127.0.0.1:0").close(),
    "keys sign": lambda folder: sign(folder, pem(request_of(new_key(), "second"))),
}
"""The commands that read a folder's files."""
READ: Final = {
    "worker": (HOST, HOST_KEY, AUTHORITY),
    **dict.fromkeys(("keys add", "keys sign"), (AUTHORITY, AUTHORITY_KEY)),
}


@pytest.mark.parametrize("damage", ["empty", "text", "other cluster", "RSA", "password", "folder", "cut"])
@pytest.mark.parametrize(("command", "name"), [(command, name) for command in READERS for name in READ[command]])
def test_a_damaged_file_of_the_keys_is_named_with_what_helps(
    first: Path, tmp_path: Path, command: str, name: str, damage: str
) -> None:
    make_cluster(tmp_path / "other", "first")
    file = first / name
    whole = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    else:
        file.write_bytes(
            {
                "empty": b"",
                "text": b"no PEM\xff",
                "other cluster": (tmp_path / "other" / name).read_bytes(),
                "RSA": rsa_key(),
                "password": locked_key(),
                "cut": whole[: len(whole) // 2],
            }[damage]
        )
    with pytest.raises(ConfigError) as error:
        READERS[command](first)
    said = str(error.value)
    assert str(file) in said, said
    assert said.startswith("keys: ")
    assert damage == "folder" or "remove the folder" in said, said


@pytest.mark.parametrize("missing", [AUTHORITY, AUTHORITY_KEY, HOST, HOST_KEY])
def test_keys_that_cannot_be_written_whole_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """A full disk or Ctrl-C at any of the files; then the command is given again."""
    written = Path.write_bytes
    secret = keys.write_secret

    def fail_at(file: Path) -> None:
        if file.name == missing:
            written(file, b"")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    def write(file: Path, content: bytes) -> int:
        fail_at(file)
        return written(file, content)

    def write_secret(file: Path, content: bytes) -> None:
        fail_at(file)
        secret(file, content)

    folder = tmp_path / "keys"
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", write)
        full.setattr(keys, "write_secret", write_secret)
        with pytest.raises(OSError, match="No space left"):
            make_cluster(folder, "first")
        assert not [*folder.iterdir()]
        if missing != AUTHORITY_KEY:
            with pytest.raises(OSError, match="No space left"):
                keys.keep(folder, new_key(), b"authority", b"own")
            assert not [*folder.iterdir()]
    make_cluster(folder, "first")
    assert link_security(folder) is not None


@pytest.mark.parametrize("left", [AUTHORITY, AUTHORITY_KEY, HOST, HOST_KEY])
def test_a_part_of_keys_is_no_new_cluster(tmp_path: Path, left: str) -> None:
    (tmp_path / left).touch()
    with pytest.raises(ConfigError, match="holds keys already; remove the folder to begin a new cluster"):
        make_cluster(tmp_path, "first")


@pytest.mark.parametrize("name", ["", "a" * 65, "a\nb", "*", "a b", "-a", "\u00fc"])
def test_a_name_that_no_host_has_is_refused(first: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^host is .*hostname"):
        add_host(name, "127.0.0.1", 1.0, str(first))


@pytest.mark.parametrize("name", ["", "a" * 65])
def test_a_host_whose_name_fits_into_no_certificate_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(platform, "node", lambda: name)
    for begins in (new_cluster, request_membership):
        with pytest.raises(ConfigError, match="set a name of 1 to 64 characters"):
            begins(str(tmp_path / "keys"))
        assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:0", "::1", "[::1]", "[::1]:0"])
def test_every_form_of_an_address_is_one(first: Path, capsys: pytest.CaptureFixture[str], listen: str) -> None:
    with pytest.raises(ConfigError, match="has not come within"):
        add_host("second", listen, 1e-3, str(first))
    at = "[::1]" if "::1" in listen else "127.0.0.1"
    assert f"--token {at}:" in capsys.readouterr().out


@pytest.mark.parametrize("minutes", [math.inf, 1e300])
def test_a_token_may_wait_for_ever(first: Path, tmp_path: Path, minutes: float) -> None:
    with ThreadPoolExecutor(1) as apart:
        made, served = serving(apart, first, 60 * minutes)
        with made:
            join(tmp_path / "second", str(made.token), "second")
            assert served.result()


def test_only_where_a_cluster_was_made_hosts_are_added(first: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="penstock keys new"):
        Enrolment(tmp_path / "nowhere", "x", "127.0.0.1:0")


def test_a_folder_without_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert link_security(None) is None
    with pytest.raises(ConfigError, match="holds no keys of a host"):
        link_security(tmp_path)


def test_text_that_is_carried_makes_a_member_too(
    first: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    second = tmp_path / "second"
    keys.request_membership(str(second))
    request = capsysbinary.readouterr().out
    keys.request_membership(str(second))
    assert keys.name_in(capsysbinary.readouterr().out) == platform.node()
    own = (second / "host.key").read_bytes()
    keys.accept_membership(keys.membership_for(request, str(first)), str(second))
    assert (second / "host.key").read_bytes() == own, "asked twice, it is the same key"
    assert reached(security_of(first), security_of(second))
    keys.request_membership(str(second))
    assert capsysbinary.readouterr().out == b""


def test_an_answer_is_for_one_request(first: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    second, third = tmp_path / "second", tmp_path / "third"
    for folder in (second, third):
        keys.request_membership(str(folder))
    whole = capsysbinary.readouterr().out
    request = whole[: whole.index(b"-----BEGIN", 1)]
    answer = keys.membership_for(request, str(first))
    with pytest.raises(ConfigError, match="answers another host's request"):
        keys.accept_membership(answer, str(third))
    for wrong in (b"", request, answer[: len(answer) // 2], answer[answer.index(b"-----BEGIN", 1) :]):
        with pytest.raises(ConfigError, match="no answer of `penstock keys sign`"):
            keys.accept_membership(wrong, str(second))
    with pytest.raises(ConfigError, match="holds keys already"):
        keys.accept_membership(answer, str(first))
    with pytest.raises(ConfigError, match="asked for nothing"):
        keys.accept_membership(answer, str(tmp_path / "fourth"))
    with pytest.raises(ConfigError, match="no request came"):
        keys.membership_for(b"\n", str(first))
    with pytest.raises(ConfigError, match="no request for one"):
        keys.membership_for(answer, str(first))
    (second / "host.key").write_text("x")
    with pytest.raises(ConfigError, match="cannot be read as a key"):
        keys.accept_membership(answer, str(second))
