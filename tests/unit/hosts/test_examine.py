"""The doctor with agents on threads and probes in processes; device speeds are not measured here."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.core import ConfigError
from penstock.hosts import doctor as examining
from penstock.hosts.doctor import Examination, examine
from penstock.hosts.facts import own_facts
from penstock.hosts.keys import link_security, make_cluster
from penstock.hosts.listing import hosts_to_examine
from penstock.hosts.messages import Beat, BeatAnswer, LeaseEnded, StartProbe, encode
from penstock.hosts.probe import ProbeReady
from penstock.transport.outbox import Sockets
from tests.agents import NotingServer, agent, name_of
from tests.unit.hosts.test_hostile_members import HostileWorker

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "NEEDED", 1 << 60)


def test_hosts_links_and_who_does_not_answer(server: NotingServer, tmp_path: Path) -> None:
    make_cluster(tmp_path / "keys", "host")
    steps: list[tuple[int, int]] = []
    with agent(link_security(tmp_path / "keys")) as one:
        report = examine([name_of(one), "127.0.0.9:1"], str(tmp_path / "keys"), False, lambda *step: steps.append(step))
    here, other, missing = report.hosts
    assert (here.host, other.host, missing.host) == ("localhost", name_of(one), "127.0.0.9:1")
    assert "GB free, and was not measured" in here.problem
    assert other.facts is not None
    assert other.clock is not None
    assert abs(other.clock.seconds) <= other.clock.error  # it is the same clock
    assert "refused" in missing.problem
    assert missing.facts is None
    assert [(link.source, link.to) for link in report.links] == [
        ("localhost", name_of(one)),
        (name_of(one), "localhost"),
    ]
    for link in report.links:
        assert link.problem == ""
        assert link.latency_ms is not None
        assert link.latency_ms > 0
        assert link.bandwidth_gbit_s is not None
        assert link.bandwidth_gbit_s > 0
    assert steps[-1] == (4, 4)


def test_this_host_alone_has_no_links() -> None:
    report = examine([], None, False, lambda *step: None)
    assert [one.host for one in report.hosts] == ["localhost"]
    assert report.links == []


def test_a_clusters_hosts_are_examined_unless_it_is_emulated(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text(
        'name = "two"\n'
        'devices = [{ name = "a", host = "localhost" }, { name = "b", host = "10.0.0.2" }]\n'
        'stages = [{ devices = ["a"] }, { devices = ["b"] }]\n'
    )
    assert hosts_to_examine(None, str(file)) == ["10.0.0.2"]
    assert hosts_to_examine("localhost,b,c:1", None) == ["b", "c:1"]
    assert hosts_to_examine(None, None) == []
    with pytest.raises(ConfigError, match="cluster demo is emulated: there is nothing to measure"):
        hosts_to_examine(None, "demo")
    with pytest.raises(ConfigError, match="hosts is left out"):
        hosts_to_examine("a", str(file))


def silent(worker: HostileWorker, asked: StartProbe) -> None:
    """No probe is started."""


def nowhere(worker: HostileWorker, asked: StartProbe) -> None:
    """The probe says that it listens where nobody can."""
    probe = worker.sockets.connect(asked.head, asked.session)
    for address in ("tcp://127.0.0.9:99999", "tcp://127.0.0.9:1"):
        probe.send(encode(ProbeReady(name=asked.name, address=address), asked.session))


def talkative(worker: HostileWorker, asked: StartProbe) -> None:
    """The probe answers what nobody has asked, for others, too."""
    probe = worker.sockets.connect(asked.head, asked.session)
    for number in range(3000):
        probe.send(encode(ProbeReady(name=f"x{number}", address="tcp://127.0.0.9:1"), asked.session))


def leaving(worker: HostileWorker, asked: StartProbe) -> None:
    """The host is lost as it is about to be measured."""
    worker.say(LeaseEnded(cause="it has been stopped"))


@pytest.mark.parametrize(
    ("behave", "patience", "problem"),
    [
        (silent, 0.5, "its probe has said nothing"),
        (nowhere, 10.0, "its probe cannot be reached: .*99999"),
        (talkative, 0.5, "its probe has said nothing"),
        (leaving, 10.0, "it has been stopped"),
    ],
)
def test_a_host_that_fails_amid_its_examination_is_named_and_the_others_are_measured(
    server: NotingServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    behave: Callable[[HostileWorker, StartProbe], None],
    patience: float,
    problem: str,
) -> None:
    answer = Examination._answer

    def hurried(examination: Examination, kind: Any, name: str, seconds: float) -> Any:
        return answer(examination, kind, name, patience if name.startswith("127.0.0.9") else seconds)

    monkeypatch.setattr(Examination, "_answer", hurried)
    make_cluster(tmp_path / "keys", "host")
    security = link_security(tmp_path / "keys")
    with agent(security) as one, Sockets(security) as sockets:
        worker, done = HostileWorker(sockets, "tcp://127.0.0.9:*"), threading.Event()

        def serve() -> None:
            worker.serve(own_facts("hostile"))
            while not done.is_set():
                for message in worker.listen(0.05):
                    if isinstance(message, Beat):
                        worker.say(BeatAnswer(sent=message.sent, received=1.0, answered=1.0))
                    elif isinstance(message, StartProbe):
                        behave(worker, message)
                worker.heard.clear()

        serving = threading.Thread(target=serve)
        serving.start()
        hosts = [worker.inbox.address.removeprefix("tcp://"), name_of(one)]
        report = examine(hosts, str(tmp_path / "keys"), False, lambda *step: None)
        done.set()
        serving.join()
        worker.inbox.close()
    _, hostile, honest = report.hosts
    assert re.search(problem, hostile.problem)
    assert honest.facts is not None
    between = [link for link in report.links if hosts[0] not in (link.source, link.to)]
    assert [bool(link.bandwidth_gbit_s) for link in between] == [True, True]
