"""A head and its hosts: leases, their end, and who is refused. Agents run on threads, with a fork server that notes."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import trustme
from msgspec.structs import replace

from penstock.core import ConfigError
from penstock.hosts import worker as agents
from penstock.hosts.facts import HostFacts, own_facts
from penstock.hosts.fetching import Fetch, Offer
from penstock.hosts.fleet import Fleet
from penstock.hosts.messages import DOOR, Beat, StartStage, encode
from penstock.hosts.remote import LOSSES_WITHIN_S, TRY_AGAIN_S, RemoteHost, pause_after
from penstock.hosts.worker import HostAgent
from penstock.pipeline.forking import exit_report
from penstock.transport.addresses import LinkSecurity
from penstock.transport.outbox import Sockets
from tests import drivers
from tests.agents import HELD, OFFER, PLAN, NotingServer, agent, fleet, name_of, reports, soon, spec
from tests.drivers import install_driver
from tests.links import member


def test_hosts_tell_what_they_are(server: NotingServer, security: LinkSecurity) -> None:
    with (
        agent(security) as one,
        agent(security, "tcp://127.0.0.3:*") as other,
        fleet(one, other, security=security) as made,
    ):
        assert list(made.living) == [name_of(one), name_of(other)]
        found = made.living[name_of(one)]
        assert found.versions == own_facts("").versions
        assert found.cores >= 1
        device = found.device("cpu")
        assert device is not None
        assert 0 < device.free <= device.memory
        soon(lambda: made.hosts[name_of(one)].offsets.best is not None)
        offset = made.hosts[name_of(one)].offsets.best
        assert offset is not None
        assert abs(offset.seconds) <= offset.error  # it is the same clock


def test_a_stage_starts_with_what_is_its_hosts_own(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int]
) -> None:
    with agent(security) as one, fleet(one, security=security) as made:
        host = made.hosts[name_of(one)]
        host.listen("s", pipe[1])
        host.start(spec("s"))
        soon(lambda: bool(server.started))
        (started,) = server.started
        assert (started.bind, started.security, started.private_network) == ("tcp://127.0.0.2:*", security, False)
        assert started.plan == PLAN


def test_a_stage_on_a_gpu_is_told_which_by_its_own_host(
    server: NotingServer, security: LinkSecurity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The head's UUID for it is not used: it names a GPU of the head's own host at best."""
    install_driver(tmp_path, monkeypatch, drivers.GEFORCE)
    asked = spec("s")
    with agent(security) as one, fleet(one, security=security) as made:
        made.hosts[name_of(one)].start(replace(asked, plan=replace(asked.plan, device="cuda:1", gpu="GPU-dd44")))
        soon(lambda: bool(server.started))
    assert (server.started[0].plan.device, server.started[0].plan.gpu) == ("cuda:1", "GPU-ab22")


def test_ends_are_reported_once_to_whose_stage_it_was(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int]
) -> None:
    with agent(security) as one, fleet(one, security=security) as made:
        host = made.hosts[name_of(one)]
        for process in ("s", "t"):
            host.listen(process, pipe[1])
            host.start(spec(process))
        soon(lambda: len(server.started) == 2)
        os.write(server.pipes["s"], exit_report("s", "killed"))
        assert reports(pipe[0]) == [{"process": "s", "cause": "killed"}]
        assert (host.ended("s"), host.ended("t")) == (True, False)
        assert list(server.pipes) == ["t"]
        host.kill("t")
        soon(lambda: server.killed == ["t"])


def test_a_head_that_leaves_takes_its_stages_along(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int]
) -> None:
    with agent(security) as one:
        with fleet(one, security=security) as made:
            made.hosts[name_of(one)].listen("s", pipe[1])
            made.hosts[name_of(one)].start(spec("s"))
            soon(lambda: bool(server.started))
        soon(lambda: server.killed == ["s"])


def test_a_head_that_falls_silent_loses_its_stages_alone(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with agent(security) as one, fleet(one, security=security) as silent, fleet(one, security=security) as other:
        for made, session in ((silent, "s"), (other, "o")):
            made.hosts[name_of(one)].listen(session, pipe[1])
            made.hosts[name_of(one)].start(spec(session))
        soon(lambda: len(server.started) == 2)
        monkeypatch.setattr(silent.hosts[name_of(one)], "beat", lambda: None)
        soon(lambda: server.killed == ["s"])


def test_a_host_that_falls_silent_is_lost_and_may_come_back(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int]
) -> None:
    with ExitStack() as first:
        one = first.enter_context(agent(security))
        with fleet(one, security=security) as made:
            host = made.hosts[name_of(one)]
            lease, before = host.lease, host.facts
            made.provide(OFFER, {name_of(one): [HELD]})
            host.listen("s", pipe[1])
            host.start(spec("s"))
            soon(lambda: bool(server.started))
            address = one.address
            first.close()
            (lost,) = reports(pipe[0])
            assert lost["process"] == "s"
            assert name_of(one) in lost["cause"]
            assert not host.alive
            assert made.living == {}
            host.listen("t", pipe[1])
            host.start(spec("t"))
            assert reports(pipe[0]) == [{**lost, "process": "t"}]
            with agent(security, address):
                soon(lambda: host.alive)
                soon(lambda: bool(made.living))
                assert host.lease != lease
                assert before is not None
                assert host.facts is not None
                assert host.facts.incarnation != before.incarnation


def test_messages_of_a_lease_that_has_ended_are_refused(
    server: NotingServer, security: LinkSecurity, caplog: pytest.LogCaptureFixture
) -> None:
    with agent(security) as one:
        with fleet(one, security=security) as made:
            lease = made.hosts[name_of(one)].lease
        soon(lambda: not one._leases)
        with Sockets(security) as sockets:
            late = sockets.connect(one.address, DOOR)
            late.send(encode(StartStage(spec=spec("s")), lease))
            soon(lambda: "a lease that has ended" in caplog.text)
    assert server.started == []


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", msgspec.msgpack.encode(("x", 1)), encode(Beat(sent=0.0), "nobody's"), b"\x92\xa1x" * 999]
)
def test_strangers_words_change_nothing(server: NotingServer, security: LinkSecurity, frame: bytes) -> None:
    with agent(security) as one, fleet(one, security=security) as made, Sockets(security) as sockets:
        stranger = sockets.connect(one.address, DOOR)
        stranger.send(frame)
        made.provide(OFFER, {name_of(one): [HELD]})  # it still answers
        assert len(one._leases) == 1


def test_other_versions_are_refused_by_name(
    server: NotingServer, security: LinkSecurity, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = own_facts("")

    def older(incarnation: str) -> HostFacts:
        versions = msgspec.structs.replace(own.versions, penstock="0.0.9", torch="2.5.1")
        return msgspec.structs.replace(own, incarnation=incarnation, versions=versions)

    monkeypatch.setattr(agents, "own_facts", older)
    said = f"has Penstock 0.0.9, this one .* and torch 2.5.1, this one {own.versions.torch}; install the same"
    with agent(security) as one, pytest.raises(ConfigError, match=f"host {name_of(one)} {said}"):
        Fleet([name_of(one)], security)


def test_hosts_of_another_cluster_are_refused(server: NotingServer, security: LinkSecurity, tmp_path: Path) -> None:
    foreign = member(trustme.CA(), tmp_path / "foreign")
    with agent(foreign) as one, pytest.raises(ConfigError, match=rf"host {name_of(one)}: .*certificate"):
        Fleet([name_of(one)], security)


def test_a_host_where_nobody_listens_is_named(security: LinkSecurity) -> None:
    with pytest.raises(ConfigError, match=r"host 127\.0\.0\.2:1: .*refused"):
        Fleet(["127.0.0.2:1"], security)


def test_beyond_this_host_nothing_goes_without_keys() -> None:
    with pytest.raises(ConfigError, match="needs keys, which `penstock keys` makes"):
        Fleet(["192.0.2.1"])
    with pytest.raises(ConfigError, match="needs keys, which `penstock keys` makes"):
        HostAgent("tcp://0.0.0.0:*")


def test_one_host_by_two_names_is_refused(server: NotingServer, security: LinkSecurity) -> None:
    with agent(security, "tcp://0.0.0.0:*") as one:
        port = one.address.rpartition(":")[2]
        with pytest.raises(
            ConfigError, match=rf"host 127\.0\.0\.[23]:{port} is the same host as 127\.0\.0\.[23]:{port}"
        ):
            Fleet([f"127.0.0.2:{port}", f"127.0.0.3:{port}"], security)


def test_a_refused_host_never_counts_as_alive(
    server: NotingServer, security: LinkSecurity, monkeypatch: pytest.MonkeyPatch
) -> None:
    lived: list[bool] = []
    lose = RemoteHost.lose

    def watched(host: RemoteHost, cause: str) -> None:
        lived.append(host.alive)
        lose(host, cause)

    monkeypatch.setattr(RemoteHost, "lose", watched)
    with agent(security, "tcp://0.0.0.0:*") as one:
        port = one.address.rpartition(":")[2]
        with pytest.raises(ConfigError, match="is the same host as"):
            Fleet([f"127.0.0.2:{port}", f"127.0.0.3:{port}"], security)
    assert lived == [False]


def test_a_problem_of_a_checkpoint_names_its_host(
    server: NotingServer, security: LinkSecurity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host without a cache can be sent nothing."""
    (tmp_path / "config.json").write_text("{}")
    offer = Offer(tmp_path, 1)
    with agent(security) as one, fleet(one, security=security) as made:
        monkeypatch.setattr(Fetch, "_proved_here", lambda fetch: "the checkpoint there is another one")
        with pytest.raises(ConfigError, match=f"host {name_of(one)}: the checkpoint there is another one"):
            made.provide(offer, {name_of(one): [HELD]})
        assert made.living == {}


def test_a_host_that_comes_back_without_the_checkpoint_is_not_used(
    server: NotingServer, security: LinkSecurity, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as first:
        one = first.enter_context(agent(security))
        with fleet(one, security=security) as made:
            address, host = one.address, made.hosts[name_of(one)]
            first.close()
            soon(lambda: not host.alive)
            monkeypatch.setattr(Fetch, "_proved_here", lambda fetch: "it is another one")
            with agent(security, address):
                soon(lambda: host.problem == "it is another one")
                assert host.alive
                assert made.living == {}


def test_a_host_that_could_not_have_its_layers_is_asked_again(
    server: NotingServer, security: LinkSecurity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.hosts.remote.RETRY_S", 1.0)
    (tmp_path / "config.json").write_text("{}")
    offer = Offer(tmp_path, 1)
    with agent(security) as one, fleet(one, security=security) as made:
        with monkeypatch.context() as full:
            full.setattr(Fetch, "_proved_here", lambda fetch: "the disk is full")
            made.ask(offer, {name_of(one): [HELD]})
            soon(lambda: made.living == {})
        soon(lambda: made.hold(offer, {name_of(one): [HELD]}))
        assert list(made.living) == [name_of(one)]


def test_a_host_that_others_do_not_reach_is_lost_and_comes_back(
    server: NotingServer, security: LinkSecurity, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.hosts.remote.TRY_AGAIN_S", 0.0)
    with agent(security) as one, fleet(one, security=security) as made:
        host = made.hosts[name_of(one)]
        lease = host.lease
        host.listen("s", pipe[1])
        made.cut_off(host.name, "stage 0 does not reach it")
        assert made.living == {}
        assert reports(pipe[0]) == [{"process": "s", "cause": f"host {host.name} was lost: stage 0 does not reach it"}]
        soon(lambda: list(made.living) == [host.name])
        assert host.lease != lease


def test_a_host_that_is_lost_again_and_again_is_left_alone() -> None:
    assert [pause_after(losses, 100.0) for losses in ([], [100.0], [50.0, 100.0])] == [
        TRY_AGAIN_S,
        TRY_AGAIN_S,
        2 * TRY_AGAIN_S,
    ]
    assert pause_after([10.0, 50.0, 100.0], 100.0) == LOSSES_WITHIN_S
    assert pause_after([10.0, 50.0, 5000.0], 5000.0) == TRY_AGAIN_S
