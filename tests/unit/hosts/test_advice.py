"""The doctor's advice: each rule speaks where it should, and is silent elsewhere."""

from __future__ import annotations

import msgspec
import pytest

from penstock.hosts.facts import DeviceFacts, HostFacts, Versions
from penstock.hosts.listing import advice_of
from penstock.hosts.probe import DeviceRates, DoctorReport, ExaminedHost, LinkRates

GB = 10**9


def host(name: str, gb_s: float = 10.0, free: int = 6 * GB) -> ExaminedHost:
    facts = HostFacts(
        name=name,
        incarnation="1",
        versions=Versions(protocol=1, penstock="0.1.0", torch="2.13.0"),
        cores=4,
        devices=(DeviceFacts(device="cpu", model="aarch64", memory=8 * GB, free=free),),
    )
    rates = DeviceRates(
        device="cpu",
        threads=4,
        dtype="float32",
        weight_bandwidth_gb_s=gb_s,
        compute_tflops=0.1,
        rows_per_second={1: 50.0, 64: 800.0},
    )
    return ExaminedHost(host=name, facts=facts, rates=[rates])


def links(forth: float = 0.94, back: float = 0.94, latency_ms: float = 0.2) -> list[LinkRates]:
    return [
        LinkRates(source="a", to="b", latency_ms=latency_ms, bandwidth_gbit_s=forth),
        LinkRates(source="b", to="a", latency_ms=latency_ms, bandwidth_gbit_s=back),
    ]


def advice(hosts: list[ExaminedHost], found: list[LinkRates]) -> list[str]:
    return advice_of(DoctorReport(hosts=hosts, links=found))


def test_memory_that_is_unknown_is_not_small_and_gpus_that_are_unknown_are_named() -> None:
    one = host("a")
    assert one.facts is not None
    devices = (DeviceFacts(device="cpu", model="m"), DeviceFacts(device="cuda:0", model="m", memory=8 * GB))
    told = msgspec.structs.replace(one.facts, devices=devices)
    assert advice([msgspec.structs.replace(one, facts=told)], []) == []
    told = msgspec.structs.replace(told, unlisted="nvidia-smi says: no")
    said = advice([msgspec.structs.replace(one, facts=told)], [])
    assert said == ["a may have GPUs that are not listed: nvidia-smi says: no"]


def test_where_all_is_well_nothing_is_said() -> None:
    assert advice([host("a"), host("b")], links()) == []


@pytest.mark.parametrize(
    ("hosts", "found", "said"),
    [
        ([], links(forth=0.02), "a to b carries 20 Mbit/s, the way back 940 Mbit/s: look for a limit in one direction"),
        ([], links(0.1, 0.1), "a to b carries 100 Mbit/s: a wired network carries a thousand"),
        (
            [],
            [*links(0.2, 0.2), LinkRates(source="c", to="d", latency_ms=0.1, bandwidth_gbit_s=2.0)],
            "a to b carries 200 Mbit/s, the fastest link 2000 Mbit/s: check its cable",
        ),
        ([], links(latency_ms=4.0), "a and b are 4.0 ms apart"),
        ([], [LinkRates(source="a", to="b", problem="Connection refused")], "a cannot send to b: Connection refused;"),
        ([host("a"), host("b", 5.0)], [], "b: cpu reads weights at 5.0 GB/s, the fastest device at 10.0"),
        ([host("a", free=1 * GB)], [], "a: cpu has 1.0 of 8.0 GB free: end what else runs there"),
    ],
)
def test_what_is_wrong_is_named(hosts: list[ExaminedHost], found: list[LinkRates], said: str) -> None:
    assert any(one.startswith(said) for one in advice(hosts, found))
