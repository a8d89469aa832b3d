"""Facts about a host: every one may be missing or odd, and none of them ends an engine or a worker."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.hosts import facts
from penstock.hosts import facts as cores
from penstock.hosts.facts import CAPABILITY, FIELDS, VISIBLE, HostFacts, gpu_of, own_facts
from penstock.transport.addresses import LinkSecurity
from tests import drivers
from tests.agents import NotingServer, agent, fleet, name_of
from tests.drivers import install_driver, run_as_driver

MIB = 1 << 20


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with 64 GiB, of which 48 are free, in no container; returns its /proc/meminfo."""
    file = tmp_path / "meminfo"
    file.write_text(
        f"MemTotal:       {64 << 20} kB\nMemFree: 5 kB\nMemAvailable:   {48 << 20} kB\nHugePages_Total: 0\n"
    )
    monkeypatch.setattr(facts, "MEMORY", file)
    monkeypatch.setattr(facts, "LIMITS", (tmp_path / "none", tmp_path / "none"))
    return file


def told() -> HostFacts:
    """This host's facts as a head reads them: what its decoder refuses would end the lease."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(own_facts("1")), type=HostFacts)


def gpus(found: HostFacts) -> list[tuple[str, int | None, int | None]]:
    """Name, and memory in MiB, of each GPU."""
    mib = [(one.device, one.memory, one.free) for one in found.devices[1:]]
    return [(name, total and total // MIB, free and free // MIB) for name, total, free in mib]


@pytest.mark.parametrize(
    ("setting", "free"),
    [
        (None, [23900, 1200, 8000]),
        ("", []),
        ("-1", []),
        ("2,0", [8000, 23900]),
        ("0,7,1", [23900]),
        ("1,1", [1200]),
        ("GPU-cc, GPU-aa11", [8000, 23900]),
        ("GPU-a", []),
        ("MIG-77,1", [None, 1200]),
    ],
)
def test_gpus_are_those_that_cuda_sees_with_its_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str | None, free: list[int | None]
) -> None:
    install_driver(tmp_path, monkeypatch, drivers.GEFORCE)
    if setting is not None:
        monkeypatch.setenv(VISIBLE, setting)
    found = told()
    assert [one[2] for one in gpus(found)] == free
    assert found.gpus == [f"cuda:{i}" for i in range(len(free))]
    assert found.unlisted == ""


def test_a_gpu_is_told_with_its_model_memory_and_capability(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_driver(tmp_path, monkeypatch, drivers.GEFORCE)
    monkeypatch.setenv(VISIBLE, "2")
    found = told().devices[1]
    assert (found.device, found.model) == ("cuda:0", "NVIDIA GeForce RTX 2080 SUPER")
    assert (found.memory, found.capability) == (8192 * MIB, (7, 5))


def test_a_gpu_keeps_the_name_that_it_had_at_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Numbers are those of the GPUs that work: a stage that starts anew is not to go to another GPU."""
    install_driver(tmp_path, monkeypatch, drivers.GEFORCE)
    facts.uuids_at_first.cache_clear()
    try:
        assert [facts.own_uuid(device) for device in ("cpu", "cuda:1", "cuda:7")] == ["", "GPU-ab22", ""]
        install_driver(tmp_path, monkeypatch, "".join(drivers.GEFORCE.splitlines(keepends=True)[1:]))
        assert facts.own_uuid("cuda:1") == "GPU-ab22"
        assert told().uuid("cuda:1") == "GPU-cc33"
    finally:
        facts.uuids_at_first.cache_clear()


@pytest.mark.parametrize("listed", ["[N/A]", "[Unknown Error]", "GPU-" + 300 * "a", "GPU-a b"])
def test_what_is_no_uuid_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listed: str) -> None:
    install_driver(tmp_path, monkeypatch, drivers.ORIN.replace("GPU-5f3a", listed))
    assert told().uuid("cuda:0") == ""


def test_a_gpu_in_parts_does_not_say_what_cuda_will_have_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_driver(tmp_path, monkeypatch, drivers.H100_MIG)
    found = told()
    assert gpus(found) == [("cuda:0", None, None), ("cuda:1", None, None), ("cuda:2", 81559, 80900)]
    assert {one.capability for one in found.devices[1:]} == {(9, 0)}
    assert [one.uuid for one in found.devices[1:]] == ["", "", "GPU-ff66"]
    monkeypatch.setenv(VISIBLE, "MIG-77,2")
    assert [one.uuid for one in told().devices[1:]] == ["MIG-77", "GPU-ff66"]


@pytest.mark.parametrize(("answer", "capability"), [(drivers.ORIN, (8, 7)), (drivers.GB10, (12, 1))])
def test_unified_memory_is_the_processors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: Path, answer: str, capability: tuple[int, int]
) -> None:
    install_driver(tmp_path, monkeypatch, answer)
    found = told()
    assert gpus(found) == [("cuda:0", 64 << 10, 48 << 10)]
    assert found.devices[1].capability == capability
    memory.unlink()
    assert gpus(told()) == [("cuda:0", None, None)]


def test_what_a_driver_does_not_tell_of_a_gpu_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_driver(tmp_path, monkeypatch, drivers.ODD)
    found = told()
    assert gpus(found) == [("cuda:0", None, None), ("cuda:1", 16384, None)]
    assert [one.model for one in found.devices[1:]] == ["NVIDIA A100, with a comma", "Tesla T4"]
    assert [one.capability for one in found.devices[1:]] == [None, None]


def test_an_old_driver_is_asked_for_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_driver(tmp_path, monkeypatch, drivers.REFUSED, code=2, old=drivers.OLD)
    found = told()
    assert gpus(found) == [("cuda:0", 16280, 16000)]
    assert (found.devices[1].model, found.devices[1].capability) == ("Tesla P100, PCIE", None)


@pytest.mark.parametrize(
    ("answer", "code", "unlisted"),
    [
        (drivers.NO_PERMISSION, 4, "nvidia-smi says: Failed to initialize NVML: Insufficient Permissions"),
        (drivers.NO_DRIVER, 9, "nvidia-smi says: NVIDIA-SMI has failed because it couldn't communicate with the"),
        (drivers.REFUSED, 2, 'nvidia-smi says: Field "compute_cap" is not a valid field to query.'),
        (b"\xff\x00\x1b[31m, , , , , ,\n\xf0\x9f", 0, "nvidia-smi says: "),
        (9999 * "x", 0, "nvidia-smi says: xxxx"),
        ("", 139, "nvidia-smi says: exit code 139"),
        (drivers.NONE, 6, ""),
        ("", 0, ""),
    ],
)
def test_a_driver_that_lists_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str | bytes, code: int, unlisted: str
) -> None:
    install_driver(tmp_path, monkeypatch, answer, code)
    found = told()
    assert gpus(found) == []
    assert found.unlisted[: len(unlisted)] == unlisted
    assert bool(found.unlisted) is bool(unlisted)


def test_one_lost_gpu_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lost = "Unable to determine the device handle for GPU0000:02:00.0: GPU is lost. Reboot the system.\n"
    install_driver(tmp_path, monkeypatch, drivers.ORIN + lost, code=15)
    found = told()
    assert (found.gpus, found.unlisted) == (["cuda:0"], "")


def test_a_slow_driver_leaves_gpus_unknown_rather_than_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_as_driver(tmp_path, monkeypatch, ["exec sleep 600"])
    monkeypatch.setattr(facts, "QUERY_S", 0.01)
    found = told()
    assert found.gpus == []
    assert found.unlisted == "nvidia-smi has not answered within 0 s"
    assert (found.may_have("cuda:0"), found.may_have("cpu"), found.may_have("cuda")) == (True, True, False)


def test_a_driver_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("not a program")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(VISIBLE, raising=False)
    assert told().unlisted == "nvidia-smi cannot be run: Exec format error"
    (tmp_path / "nvidia-smi").unlink()
    assert told().unlisted == ""


@pytest.mark.parametrize(
    ("content", "total", "free"),
    [
        (None, None, None),
        ("", None, None),
        ("MemTotal\nMemTotal:\n:::\nMemAvailable: many kB\n", None, None),
        ("MemTotal: 0 kB\nMemAvailable: 4 kB", None, 4096),
        ("MemTotal: 8 kB\n", 8192, None),
        ("Odd:\nMemTotal: 8 kB\nMemAvailable: 4 kB", 8192, 4096),
        (b"\xff\xfe", None, None),
    ],
)
def test_memory_that_the_system_does_not_tell_is_unknown(
    memory: Path, content: str | bytes | None, total: int | None, free: int | None
) -> None:
    memory.unlink()
    if content is not None:
        memory.write_bytes(content.encode() if isinstance(content, str) else content)
    found = told().devices[0]
    assert (found.memory, found.free) == (total, free)


@pytest.mark.parametrize(
    ("limit", "used", "total", "free"),
    [
        ("max", "5", 64 << 30, 48 << 30),
        (str(8 << 30), str(6 << 30), 8 << 30, 2 << 30),
        (str(8 << 30), str(9 << 30), 8 << 30, 0),
        (str(8 << 30), "", 64 << 30, 48 << 30),
    ],
)
def test_a_containers_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, used: str, total: int, free: int
) -> None:
    files = tmp_path / "memory.max", tmp_path / "memory.current"
    for file, content in zip(files, (limit, used), strict=True):
        file.write_text(content)
    monkeypatch.setattr(facts, "LIMITS", files)
    monkeypatch.setattr(facts, "STATISTICS", tmp_path / "none")
    found = told().devices[0]
    assert (found.memory, found.free) == (total, free)


@pytest.mark.parametrize(
    ("statistics", "free"),
    [
        ("anon 7\ninactive_file 1073741824\nactive_file 9\n", 3 << 30),
        (f"inactive_file {9 << 30}\n", 8 << 30),
        ("inactive_file -1\n", 2 << 30),
        ("", 2 << 30),
    ],
)
def test_files_that_a_container_has_read_leave_their_memory_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statistics: str, free: int
) -> None:
    files = tmp_path / "memory.max", tmp_path / "memory.current"
    for file, content in zip(files, (8 << 30, 6 << 30), strict=True):
        file.write_text(str(content))
    (tmp_path / "memory.stat").write_text(statistics)
    monkeypatch.setattr(facts, "LIMITS", files)
    monkeypatch.setattr(facts, "STATISTICS", tmp_path / "memory.stat")
    assert told().devices[0].free == free


@pytest.mark.parametrize("quota", ["", "max", "100000 0", "a b", b"\xff"])
def test_an_odd_share_of_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str | bytes) -> None:
    file = tmp_path / "cpu.max"
    file.write_bytes(quota.encode() if isinstance(quota, str) else quota)
    monkeypatch.setattr(cores, "QUOTA", file)
    assert 1 <= told().cores <= (os.cpu_count() or 1)


@pytest.mark.parametrize("name", ["", "n" * 999, "a\nb\x00c\udcff"])
def test_odd_names_of_host_and_processor(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(platform, "node", lambda: name)
    monkeypatch.setattr(platform, "machine", lambda: name)
    found = told()
    assert found.name == found.devices[0].model
    assert found.name[:1] == name[:1]


def test_more_gpus_than_a_message_has_room_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_driver(tmp_path, monkeypatch, "".join(f"{i}{drivers.GB10[1:]}" for i in range(999)))
    assert len(told().devices) == facts.MOST_DEVICES


FIELD = st.sampled_from(["[N/A]", "[Not Supported]", "", "0", "7", "-3", "9" * 40, "8.6", "٣", "Enabled"]) | st.text()


@given(st.lists(FIELD, max_size=9))
def test_no_line_of_a_driver_is_too_odd(fields: list[str]) -> None:
    found = gpu_of(", ".join(fields), FIELDS)
    if found is not None:
        assert found.number.isascii()
        assert found.memory is None or 0 < found.memory < 1 << 63
        assert found.free is None or 0 <= found.free < 1 << 63
        assert found.capability is None or CAPABILITY.fullmatch(f"{found.capability[0]}.{found.capability[1]}")


@pytest.mark.parametrize(
    ("answer", "code"),
    [(drivers.ORIN, 0), (drivers.H100_MIG, 0), (drivers.ODD, 0), (drivers.NO_PERMISSION, 4), (b"\xff\x00,,,,,,", 0)],
)
def test_a_worker_lives_when_a_head_attaches(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    server: NotingServer,
    security: LinkSecurity,
    answer: str | bytes,
    code: int,
) -> None:
    install_driver(tmp_path, monkeypatch, answer, code)
    with agent(security) as one:
        for _ in range(2):
            with fleet(one, security=security) as made:
                assert made.living[name_of(one)].devices == own_facts("").devices
