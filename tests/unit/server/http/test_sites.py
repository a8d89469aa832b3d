"""The names that a server answers to, and the pages that may use it."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from penstock.config import FieldError
from penstock.server.http.middleware import Hosts, Records, Sites, name_of
from penstock.server.settings import Listening

OWN = socket.gethostname().lower()
LOOPBACK = ["localhost", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "app.localhost"]
ADDRESSES = ["10.0.0.2", "192.168.1.1", "203.0.113.9", "2001:db8::1", "0.0.0.0"]
STRANGE = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "",
    "example.org",
    "2130706433",
    "0x7f.1",
]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "localhost", "127.0.0.2", "127.1", "LOCALHOST", "::ffff:127.0.0.1"]
)
def test_on_loopback_only_loopback_is_a_name(host: str) -> None:
    hosts = Hosts(Listening(host=host))
    assert [name for name in [*LOOPBACK, *ADDRESSES, *STRANGE, "box.lan"] if hosts.include(name)] == LOOPBACK


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.2", "box.lan"])
def test_elsewhere_addresses_and_the_hosts_own_names_are(host: str) -> None:
    hosts, own = Hosts(Listening(host=host)), [OWN, OWN.partition(".")[0] + ".local"]
    expected = [*LOOPBACK, *ADDRESSES, *own]
    assert [name for name in [*LOOPBACK, *ADDRESSES, *own, *STRANGE] if hosts.include(name)] == expected
    assert hosts.include("box.lan") is (host == "box.lan")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(
    ("allowed", "fit", "others"),
    [
        ("llm.example.org", ["llm.example.org"], ["a.llm.example.org", "example.org"]),
        (
            ".Example.org",
            ["example.org", "llm.example.org", "a.b.example.org"],
            ["evilexample.org", "example.org.evil"],
        ),
        ("*", ["anything", "evil.example"], []),
    ],
)
def test_further_names_are_as_in_djangos_list(host: str, allowed: str, fit: list[str], others: list[str]) -> None:
    hosts = Hosts(Listening(host=host, allowed_hosts=(allowed,)))
    assert all(map(hosts.include, fit))
    assert not any(map(hosts.include, others))


@pytest.mark.parametrize("name", ["", "http://a.example", "a.example:80", "a/b", "a b", "größe"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(FieldError, match=r"allowed_hosts is .*without scheme and port"):
        Listening(allowed_hosts=(name,))


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost:8000", "localhost"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("a.example.", "a.example"),
        ("1.2.3.4:", "1.2.3.4"),
    ],
)
def test_a_host_header_is_a_name_and_a_port(header: str, name: str) -> None:
    assert name_of(header) == name


def client(listening: Listening | None, *origins: str) -> TestClient:
    app = FastAPI()

    @app.get("/")
    def home() -> str:
        return "home"

    app.add_middleware(Sites, listening=listening, origins=origins)
    app.add_middleware(Records, on_end=[])
    return TestClient(app)


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost:8000", None, 200),
        ("LOCALHOST:8000", "http://localhost:8000", 200),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("127.0.0.1:8000", "https://127.0.0.1:8000", 200),
        ("127.0.0.1:8000", "http://localhost:8000", 403),
        ("127.0.0.1:8000", "http://127.0.0.1:9000", 403),
        ("127.0.0.1:8000", "http://evil.example", 403),
        ("127.0.0.1:8000", "null", 403),
        ("127.0.0.1:8000", "", 403),
        ("127.0.0.1:8000", "https://allowed.example", 200),
        ("evil.example:8000", None, 421),
        ("evil.example:8000", "http://evil.example:8000", 421),
        ("evil.example:8000", "https://allowed.example", 421),
    ],
)
def test_a_host_and_an_origin_together(host: str, origin: str | None, status: int) -> None:
    headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
    reply = client(Listening(), "https://allowed.example").get("/", headers=headers)
    assert reply.status_code == status
    if status != 200:
        assert reply.json()["error"]["code"] == {421: "host_not_allowed", 403: "origin_not_allowed"}[status]
        assert {421: "--allowed-hosts", 403: "--allowed-origins"}[status] in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("listening", "origins", "headers", "status"),
    [
        (None, [], {"Host": "whatever.example"}, 200),
        (None, [], {"Host": "whatever.example", "Origin": "http://evil.example"}, 403),
        (Listening(), ["*"], {"Host": "localhost", "Origin": "http://evil.example"}, 200),
        (Listening(allowed_hosts=("*",)), [], {"Host": "a.example"}, 200),
        (Listening(allowed_hosts=("*",)), [], {"Host": "a.example", "Origin": "https://a.example"}, 200),
    ],
)
def test_what_a_user_has_allowed(listening: Any, origins: list[str], headers: dict[str, str], status: int) -> None:
    assert client(listening, *origins).get("/", headers=headers).status_code == status
