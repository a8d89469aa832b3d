"""The doctor with agents on threads and probes in processes; device speeds are not measured here."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core import ConfigError
from penstock.hosts.doctor import examine as examining
from penstock.hosts.doctor.command import hosts_to_examine
from penstock.hosts.doctor.examine import examine
from penstock.hosts.keys import link_security, make_cluster
from tests.agents import NotingServer, agent, name_of

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
