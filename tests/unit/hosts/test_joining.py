"""Workers that come to a head by themselves, before it begins, while it runs, and after it was away."""

from __future__ import annotations

import secrets
from contextlib import ExitStack, closing

import pytest

from penstock.config import FieldError
from penstock.hosts import worker as joining
from penstock.hosts.fleet import MOST_HOSTS, Fleet
from penstock.hosts.messages import HEAD_DOOR, Beat, Join, encode
from penstock.hosts.worker import Joining
from penstock.transport.addresses import LinkSecurity
from penstock.transport.outbox import Sockets
from tests.agents import NotingServer, agent, name_of, soon


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "AGAIN_S", 0.05)


@pytest.fixture
def door() -> str:
    """A head's door at an address of loopback that nobody else has."""
    return f"127.{'.'.join(str(100 + secrets.randbelow(100)) for _ in range(3))}:7701"


def test_a_head_waits_for_workers_that_came_first(server: NotingServer, security: LinkSecurity, door: str) -> None:
    with ExitStack() as there:
        one, other = (there.enter_context(agent(security, f"tcp://127.0.0.{last}:*")) for last in (2, 3))
        for host in (one, other):
            there.enter_context(Joining(door, name_of(host), security, False))
        with closing(Fleet([], security, door=door)) as made:
            made.wait_for(2)
            assert set(made.living) == {name_of(one), name_of(other)}
            assert made.reached_at == door.partition(":")[0]


def test_a_worker_that_comes_later_is_one_more_host(server: NotingServer, security: LinkSecurity, door: str) -> None:
    with (
        agent(security) as one,
        agent(security, "tcp://127.0.0.3:*") as late,
        closing(Fleet([name_of(one)], security, door=door)) as made,
    ):
        assert list(made.living) == [name_of(one)]
        with Joining(door, name_of(late), security, False):
            soon(lambda: list(made.living) == [name_of(one), name_of(late)])


def test_a_worker_that_is_named_and_comes_is_one_host(
    server: NotingServer, security: LinkSecurity, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes under its address in numbers, or under another address of its own."""
    with agent(security, "tcp://0.0.0.0:*") as one:
        port = one.address.rpartition(":")[2]
        named = f"localhost:{port}"
        with closing(Fleet([named], security, door=door)) as made:
            with (
                Joining(door, f"127.0.0.1:{port}", security, False),
                Joining(door, f"127.0.0.9:{port}", security, False),
            ):
                soon(lambda: f"host 127.0.0.9:{port} is the same host as {named}" in caplog.text)
            assert list(made.living) == [named]
            assert f"127.0.0.1:{port}" not in made.hosts


def test_a_head_that_begins_again_gets_its_workers_back(
    server: NotingServer, security: LinkSecurity, door: str
) -> None:
    with agent(security) as one, Joining(door, name_of(one), security, False):
        for _ in range(2):
            with closing(Fleet([], security, door=door)) as made:
                made.wait_for(1)


def test_nothing_else_opens_the_door(
    server: NotingServer, security: LinkSecurity, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        agent(security) as one,
        closing(Fleet([name_of(one)], security, door=door)) as made,
        Sockets(security) as sockets,
    ):
        stranger = sockets.connect(f"tcp://{door}", HEAD_DOOR)
        stranger.send(encode(Beat(sent=0.0), HEAD_DOOR))
        stranger.send(encode(Join(host="a.name:7700"), HEAD_DOOR))
        soon(lambda: "Beat does not open" in caplog.text and "$.host" in caplog.text)
        assert list(made.hosts) == [name_of(one)]


def test_more_hosts_than_there_are_places_end_nothing(
    server: NotingServer,
    security: LinkSecurity,
    door: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member says that hundreds have come, which are nowhere; one that does come has a place once they are gone."""
    monkeypatch.setattr("penstock.hosts.remote.ANSWER_S", 4.0)
    with (
        agent(security) as one,
        agent(security, "tcp://127.0.0.3:*") as late,
        closing(Fleet([name_of(one)], security, door=door)) as made,
        Sockets(security) as sockets,
    ):
        secret = made.hosts[name_of(one)].lease
        member = sockets.connect(f"tcp://{door}", HEAD_DOOR)
        told = [f"127.0.0.9:{port}" for port in range(1, MOST_HOSTS + 45)]
        for name in (*told, "127.0.0.9:0", "127.0.0.9:99999"):
            member.send(encode(Join(host=name), HEAD_DOOR))
        soon(lambda: f"host {told[MOST_HOSTS]} has come, and has no place: 256 are the most" in caplog.text)
        assert len(made.hosts) == MOST_HOSTS
        assert list(made.living) == [name_of(one)]
        with Joining(door, name_of(late), security, False):
            soon(lambda: name_of(late) in made.living)
            soon(lambda: len(made.hosts) == 2)
        assert made.hosts[name_of(one)].lease == secret, "nothing has disturbed who was there"
        assert made._thread.is_alive()


def test_a_door_is_an_address_that_others_can_use(security: LinkSecurity) -> None:
    with pytest.raises(FieldError, match="name the address of this host at which they reach it"):
        Fleet([], security, door="0.0.0.0:7701")
