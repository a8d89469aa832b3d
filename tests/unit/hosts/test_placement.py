"""The host, device and threads of each stage; mistakes are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pytest

from penstock.cluster import load_cluster
from penstock.cluster.spec import Cluster
from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.hosts.facts import DeviceFacts, HostFacts, Versions
from penstock.hosts.placement import (
    AskedHosts,
    asked_hosts,
    check_gpus,
    check_memory,
    devices_elsewhere,
    has_room,
    host_and_port,
    hosts_asked_for,
    hosts_of_ranks,
    moved,
    named_hosts,
    other_hosts,
    threads_elsewhere,
)

VERSIONS = Versions(protocol=1, penstock="0", torch="2")


def hosts_of_stages(hosts: str | None, cluster: Cluster | None, stages: int) -> tuple[str, ...]:
    """The host of each stage, each of one rank, as plans name it."""
    return tuple(group[0] for group in hosts_of_ranks(hosts, cluster, stages))


def facts(cores: int = 4, gpus: int = 0, free: int = 8 << 30) -> HostFacts:
    devices = ("cpu", *(f"cuda:{i}" for i in range(gpus)))
    return HostFacts(
        name="x",
        incarnation="1",
        versions=VERSIONS,
        cores=cores,
        devices=tuple(DeviceFacts(device=name, model="m", memory=16 << 30, free=free) for name in devices),
    )


@pytest.mark.parametrize("text", ["", "a,", "a,,b", "a,a"])
def test_lists_of_hosts_that_are_none(text: str) -> None:
    with pytest.raises(FieldError, match="hosts is"):
        named_hosts(text)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a", ("a", "")),
        ("a:7700", ("a", "7700")),
        ("10.0.0.1:65535", ("10.0.0.1", "65535")),
        ("::1", ("::1", "")),
        ("fe80::1%eth0", ("fe80::1%eth0", "")),
        ("[::1]", ("[::1]", "")),
        ("[::1]:7700", ("[::1]", "7700")),
        ("[fe80::1%eth0]:7700", ("[fe80::1%eth0]", "7700")),
    ],
)
def test_a_host_with_and_without_a_port(name: str, found: tuple[str, str]) -> None:
    assert host_and_port(name) == found
    assert host_and_port(name, "listen", least_port=0) == found


NO_HOSTS: Final = ["", ":", ":1", "a:", "a:b", "a:b:c", "a b", "[::1", "::1]", "::1]:1", "[::1]:", "[::1]1", "[a]:1"]
NO_HOSTS += ["[]:1", "[[::1]]:1", "a:65536", "a:-1", "a:1.5", f"a:{'9' * 20}", "a:\u0661", "[::1]:65536", "1::2::3"]


@pytest.mark.parametrize("name", NO_HOSTS)
def test_what_is_no_host(name: str) -> None:
    with pytest.raises(FieldError, match=r"^join names "):
        host_and_port(name, "join")


def test_port_0_is_for_those_who_listen() -> None:
    assert host_and_port("a:0", "listen", least_port=0) == ("a", "0")
    with pytest.raises(FieldError, match=r"hosts names 'a:0'; a port is a number from 1 to 65535"):
        host_and_port("a:0")


def test_a_host_may_be_named_for_each_of_its_gpus() -> None:
    assert asked_hosts("a, a,b,a") == AskedHosts(("a", "a", "b", "a"))
    assert hosts_of_stages("a,a,b", None, 3) == ("a", "a", "b")
    assert hosts_of_stages("a,b,a", None, 3) == ("a", "b", "a")
    assert other_hosts(("b", "localhost", "a", "localhost", "b")) == ["b", "a"]
    living = {"a": facts(gpus=3), "b": facts(gpus=1)}
    assert devices_elsewhere(("a", "b", "a"), living, "cuda") == {0: "cuda:0", 1: "cuda:0", 2: "cuda:1"}


def test_a_host_that_is_named_more_often_than_it_has_gpus_is_refused() -> None:
    names = ("a", "a", "b", "c", "c")
    unknown = msgspec.structs.replace(facts(), unlisted="nvidia-smi has not answered within 5 s")
    check_gpus(names, {"a": facts(gpus=2), "b": facts(), "c": unknown})
    check_gpus(names, {})
    said = "hosts names a 2 times; name it once for each of its GPUs: it has cpu, cuda:0"
    with pytest.raises(FieldError, match=f"^{said}$"):
        check_gpus(names, {"a": facts(gpus=1)})


def test_a_list_may_end_in_a_door() -> None:
    assert asked_hosts("a:7700,b") == AskedHosts(("a:7700", "b"))
    assert asked_hosts("localhost, join://10.0.0.1:7701") == AskedHosts(("localhost",), "10.0.0.1:7701")
    assert asked_hosts("join://10.0.0.1:7701") == AskedHosts((), "10.0.0.1:7701")
    assert hosts_asked_for("localhost,join://10.0.0.1:7701", None) == ("localhost",)


@pytest.mark.parametrize("text", ["join://", "join://a", "join://a:7701,b", "a,a,join://a:1", ",join://a:1"])
def test_doors_that_are_none(text: str) -> None:
    with pytest.raises(FieldError, match="hosts is"):
        asked_hosts(text)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [(2, ("a", "b")), (3, ("a", "a", "b")), (4, ("a", "a", "b", "b")), (5, ("a",) * 3 + ("b",) * 2)],
)
def test_neighbouring_stages_share_a_host(stages: int, expected: tuple[str, ...]) -> None:
    assert hosts_of_stages("a,b", None, stages) == expected


def test_this_host_has_no_name_in_plans() -> None:
    assert hosts_of_stages("localhost,b", None, 2) == ("", "b")
    assert hosts_of_stages(None, None, 2) == ("", "")


def test_hosts_beyond_the_stages_are_spares() -> None:
    assert hosts_of_stages("a,b,c", None, 2) == ("a", "b")
    assert hosts_of_stages("a,c", None, 2) == ("a", "c")


def test_a_cluster_says_where_its_stages_are(tmp_path: Path) -> None:
    file = tmp_path / "two.toml"
    file.write_text("""
        name = "two"
        devices = [{ name = "d", host = "a:7700" }, { name = "e", host = "b" }, { name = "f" }]
        stages = [{ devices = ["e"] }, { devices = ["d"] }, { devices = ["f"] }]
    """)
    cluster = load_cluster(str(file))
    assert hosts_asked_for(None, cluster) == ("b", "a:7700", "localhost")
    assert hosts_of_stages(None, cluster, 3) == ("b", "a:7700", "")


def test_an_emulated_cluster_is_on_this_host() -> None:
    cluster = load_cluster("flowspec-7b")
    assert hosts_asked_for(None, cluster) == ("localhost",)
    assert set(hosts_of_stages(None, cluster, len(cluster.stages))) == {""}


def test_stages_spread_over_a_hosts_gpus() -> None:
    hosts = ("a", "a", "a", "b")
    living = {"a": facts(gpus=2), "b": facts(gpus=1)}
    assert devices_elsewhere(hosts, living, "cuda") == {0: "cuda:0", 1: "cuda:0", 2: "cuda:1", 3: "cuda:0"}


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(device: str) -> None:
    living = {"a": facts(gpus=2), "b": facts(gpus=0)}
    with pytest.raises(ConfigError, match=f"host b has no device '{device}'; it has cpu"):
        devices_elsewhere(("a", "b"), living, device)


def test_threads_are_the_cores_of_each_host_among_its_stages() -> None:
    living = {"a": facts(cores=8), "b": facts(cores=3)}
    assert threads_elsewhere(("a", "b", "a", "", "b"), living, [None] * 5) == {0: 4, 2: 4, 1: 1, 4: 1}
    assert threads_elsewhere(("a", "a"), living, [2, None]) == {0: 2, 1: 6}


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    living = {"a": facts(free=3 << 30), "b": facts(free=3 << 30)}
    hosts, devices = ("a", "a", "b", ""), ("cpu",) * 5
    check_memory(hosts, devices, [1 << 30, 2 << 30, 3 << 30, 99 << 30], living)
    with pytest.raises(ConfigError, match=r"host a: cpu has 3\.22 GB free, its stages need 4\.29 GB") as refused:
        check_memory(hosts, devices, [2 << 30, 2 << 30, 1 << 30, 0], living)
    assert "host b" not in str(refused.value)


def test_a_host_that_does_not_know_its_memory_is_believed() -> None:
    device = DeviceFacts(device="cpu", model="m")
    living = {"a": HostFacts(name="x", incarnation="1", versions=VERSIONS, cores=1, devices=(device,))}
    check_memory(("a",), ("cpu", "cpu"), [99 << 40], living)


def roomy(limits: dict[str, int] | None = None) -> Callable[[str, Sequence[int]], bool]:
    """Hosts with room for so many stages; others have room for all."""
    return lambda host, stages: len(stages) <= (limits or {}).get(host, 99)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ("abc", "abc"),
        ("abcd", "abc"),
        ("acd", "adc"),
        ("ac", "aac"),
        ("bc", "bbc"),
        ("ab", "abb"),
        ("a", "aaa"),
        ("ade", "ade"),
    ],
)
def test_stages_of_lost_hosts_move_and_the_others_stay(there: str, expected: str) -> None:
    assert "".join(moved("abc", there, roomy())) == expected


def test_stages_move_where_there_is_room() -> None:
    assert moved("abc", "ac", roomy({"a": 1})) == ("a", "c", "c")
    assert moved("abcd", "acd", roomy({"a": 1, "c": 1})) == ("a", "d", "c", "d")
    with pytest.raises(ConfigError, match="none of the hosts that are there has room for stage 1 of 3"):
        moved("abc", "ac", roomy({"a": 1, "c": 1}))


def test_two_stages_of_a_lost_host_share_a_spare_or_the_neighbours() -> None:
    assert moved(("a", "b", "b", "c"), ("a", "c", "s"), roomy()) == ("a", "s", "s", "c")
    assert moved(("a", "b", "b", "c"), ("a", "c"), roomy()) == ("a", "a", "c", "c")


@pytest.mark.parametrize(
    ("device", "needed", "fit"),
    [
        ("cpu", [2, 3], True),
        ("cpu", [3, 3], False),
        ("cuda:1", [2, 3], True),
        ("cuda:1", [3, 3], False),
        ("cuda:2", [1], False),
        ("cuda", [5, 5], True),
        ("cuda", [6], False),  # two GPUs have room for it together, neither alone
        ("cuda", [2, 3, 5], True),
        ("cuda", [3, 3, 1], False),
    ],
)
def test_stages_have_room_on_the_device_that_each_gets(device: str, needed: list[int], fit: bool) -> None:
    assert has_room("a", facts(gpus=2, free=5), device, needed) is fit


def test_gpus_that_could_not_be_listed_are_used_by_name() -> None:
    living = {"a": msgspec.structs.replace(facts(), unlisted="nvidia-smi has not answered within 5 s")}
    assert devices_elsewhere(("a", "a"), living, "cuda:1") == {0: "cuda:1", 1: "cuda:1"}
    with pytest.raises(ConfigError, match="has no device 'cuda'; it has cpu; it may have GPUs: nvidia-smi has not"):
        devices_elsewhere(("a",), living, "cuda")
    assert has_room("a", living["a"], "cuda:1", [1 << 50])
