"""The listing of hosts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.hosts.facts import DeviceFacts, HostFacts, Versions
from penstock.hosts.listing import ListedHost, show
from penstock.hosts.probe import LinkRates
from penstock.hosts.remote import ClockOffset

FACTS = HostFacts(
    name="b",
    incarnation="1",
    versions=Versions(protocol=1, penstock="0.1.0", torch="2.13.0"),
    cores=6,
    devices=(
        DeviceFacts(device="cpu", model="aarch64", memory=8 * 10**9, free=6 * 10**9),
        DeviceFacts(device="cuda:0", model="Orin"),
    ),
)


def test_hosts_that_answer_and_those_that_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    answering = ListedHost(host="b:7700", facts=FACTS, clock=ClockOffset(12.0, 0.00025))
    show([answering, ListedHost(host="c", problem="host c: connection refused")])
    lines = capsys.readouterr().out.splitlines()
    first, second = (next(line for line in lines if word in line) for word in ("aarch64", "Orin"))
    for word in ("b:7700", "cpu", "6.0 of 8.0 GB", "6", "0.1.0", "2.13.0", "0.50 ms"):
        assert word in first
    assert "cuda:0" in second
    assert "unknown" in second
    assert lines[-1] == "host c: connection refused"


def test_memory_and_gpus_that_are_not_known_are_not_zero(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = DeviceFacts(device="cuda:0", model="A100", memory=40 * 10**9)
    show([ListedHost(host="b", facts=replace(FACTS, devices=(gpu,), unlisted="nvidia-smi says: no"))])
    out = capsys.readouterr().out
    assert "unknown of 40.0 GB" in out
    assert out.splitlines()[-1] == "b may have GPUs: nvidia-smi says: no"


def test_links_have_a_column_once_they_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    there = LinkRates(source="localhost", to="b", latency_ms=0.2, bandwidth_gbit_s=0.9412)
    back = LinkRates(source="b", to="localhost", problem="timed out")
    show([ListedHost(host="b", facts=FACTS, links=(there, back)), ListedHost(host="c", facts=FACTS)])
    assert "0.94, ? Gbit/s" in capsys.readouterr().out
    show([ListedHost(host="b", facts=FACTS)])
    assert "link" not in capsys.readouterr().out


def test_a_narrow_terminal_has_fewer_columns_and_whole_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model = "Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz"
    device = DeviceFacts(device="cpu", model=model, memory=8 * 10**9, free=6 * 10**9)
    show([ListedHost(host="second.example:7700", facts=replace(FACTS, devices=(device,)))])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "second.example:7700" in out
    assert "6.0 of 8.0 GB" in out
    assert "Not shown in 80 columns: torch, model." in out
