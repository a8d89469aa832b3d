"""What is shown of hosts."""

from __future__ import annotations

import pytest

from penstock.hosts.facts import DeviceFacts, HostFacts, Versions
from penstock.hosts.listing import ListedHost, show
from penstock.hosts.offsets import ClockOffset

FACTS = HostFacts(
    name="b",
    incarnation="1",
    versions=Versions(protocol=1, penstock="0.1.0", torch="2.13.0"),
    cores=6,
    devices=(
        DeviceFacts(device="cpu", model="aarch64", memory=8 * 10**9, free=6 * 10**9),
        DeviceFacts(device="cuda:0", model="Orin", memory=0, free=0),
    ),
)


def test_hosts_that_answer_and_those_that_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    answering = ListedHost(host="b:7700", facts=FACTS, clock=ClockOffset(12.0, 0.00025))
    show([answering, ListedHost(host="c", problem="host c: connection refused")])
    lines = capsys.readouterr().out.splitlines()
    for word in ("b:7700", "cpu (aarch64)", "6.0 of 8.0 GB", "6", "0.1.0", "2.13.0", "0.50 ms"):
        assert word in lines[1]
    assert "cuda:0 (Orin)" in lines[2]
    assert "unknown" in lines[2]
    assert "host c: connection refused" in lines[3]
