"""Facts about a host: its processor, memory and GPUs, and the threads for each process."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from penstock.core import __version__
from penstock.messages import MOST_LABEL, PROTOCOL, Index, Label, Word, cut

# ---------------------------------------------------------------------------------------------------------------- cores
# Shares this host's cores among an engine's processes: how many threads each of them computes with.

CPUS: Final = Path("/sys/devices/system/cpu")
QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
"""A container's limit (cgroup v2): microseconds of processor time, or "max", and the microseconds of its period."""


def usable_cores() -> int:
    """The number of cores that this process may use, at least 1: those of its affinity, within its container's share.

    Two hardware threads of one core count once: they share its arithmetic units and its way to the memory, for which a
    step waits.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len({core_of(cpu) for cpu in cpus})
    quota = container_cores()
    return max(1, cores if quota is None else min(cores, int(quota)))


def core_of(cpu: int) -> str:
    """A name of this CPU's core: the list of its hardware threads, or the CPU's number if the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        return (CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    return str(cpu)


def container_cores() -> float | None:
    """The container's limit in cores; None without one."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        share, period = QUOTA.read_text().split()
        return None if share == "max" else int(share) / int(period)
    return None


def shared_threads(stated: Iterable[int | None], cores: int) -> tuple[int, ...]:
    """Threads of each process: those ``stated``, and for the others equal parts of the cores that are left.

    Every process gets at least one. A remainder of cores is left to the engine and the system: if some stages had one
    core more, they would only wait for the others.
    """
    threads = list(stated)
    others = threads.count(None)
    left = cores - sum(count for count in threads if count is not None)
    each = max(1, left // others) if others else 0
    return tuple(each if count is None else count for count in threads)


# ---------------------------------------------------------------------------------------------------------------- facts
# Facts about a host: versions, cores, devices. Every head is told, and compares versions before it starts anything.

MEMORY: Final = Path("/proc/meminfo")
LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))
STATISTICS: Final = Path("/sys/fs/cgroup/memory.stat")
"""A container's memory (cgroup v2): bytes that it may use, or "max", and bytes that it uses."""
FIELDS: Final = ("index", "uuid", "memory.total", "memory.free", "compute_cap", "mig.mode.current", "name")
OLD_FIELDS: Final = ("index", "uuid", "memory.total", "memory.free", "name")
"""The fields that nvidia-smi is asked for, and those that the oldest drivers know. A name may have commas: it is last.
"""
UNIFIED: Final = re.compile(r"\b(GB10|nvgpu|Tegra|Xavier|Orin|Thor)\b")
"""Models of GPUs that share the processor's memory, for which nvidia-smi states none: DGX Spark and Jetson."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""The variable that names the GPUs CUDA may see: driver indices or beginnings of UUIDs. CUDA numbers them from 0."""
QUERY_S: Final = 5.0
"""Seconds that the driver may take to answer. A slower one leaves the GPUs unlisted."""
NONE_FOUND: Final = "No devices were found"
"""The answer of nvidia-smi where the driver has no GPU."""
UNKNOWN_FIELD: Final = "not a valid field"
"""Words of nvidia-smi about a field that it does not know."""
UUID: Final = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]{1,100}")
"""Matches the UUID of a GPU, or of a part of one. A driver may list "[N/A]" in its place."""
HIDDEN: Final = ("", "-1")
"""Values of ``VISIBLE`` that hide all GPUs."""
NUMBER: Final = re.compile(r"[0-9]{1,12}")
CAPABILITY: Final = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})")
MOST_CORES: Final = 1 << 16
MOST_DEVICES: Final = 256
"""The most cores and the most devices that a host may say it has: more than any host really has."""


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Versions that have to be the same on every host, so that stages understand each other and compute alike."""

    protocol: Index
    penstock: Label
    torch: Label
    """The version without the build's suffix ("+cu126")."""


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A device by torch's name, "cpu" or "cuda:N", and its memory in bytes: None where the host cannot say."""

    device: Label
    model: Label
    memory: Word | None = None
    free: Word | None = None
    capability: tuple[Index, Index] | None = None
    """A GPU's compute capability, major and minor; None for a processor, or where the driver does not say."""
    uuid: Label = ""
    """A GPU's name for good, as the driver lists it; empty for a processor, or where the driver does not say."""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A host's facts. ``incarnation`` changes each time the agent starts; ``devices`` begin with the processor."""

    name: Label
    incarnation: Label
    versions: Versions
    cores: Annotated[int, msgspec.Meta(ge=1, le=MOST_CORES)]
    devices: Annotated[tuple[DeviceFacts, ...], msgspec.Meta(min_length=1, max_length=MOST_DEVICES)]
    unlisted: Label = ""
    """The reason why the driver lists no GPUs though there may be some; empty if ``devices`` are complete."""

    def device(self, name: str) -> DeviceFacts | None:
        return next((one for one in self.devices if one.device == name), None)

    def uuid(self, device: str) -> str:
        """The UUID of a GPU; empty for a processor, and for a GPU whose number has to do."""
        found = self.device(device)
        return "" if found is None else found.uuid

    @property
    def gpus(self) -> list[str]:
        return [one.device for one in self.devices if one.device != "cpu"]

    def may_have(self, device: str) -> bool:
        """Whether the device is there, or is a GPU of a host that could not list its GPUs."""
        return self.device(device) is not None or (device.startswith("cuda:") and bool(self.unlisted))

    @property
    def known(self) -> str:
        """Words for the devices that are there, for errors about one that is not."""
        found = ", ".join(one.device for one in self.devices)
        return f"{found}; it may have GPUs: {self.unlisted}" if self.unlisted else found


def own_versions() -> Versions:
    """The versions of the protocol, of Penstock and of torch here, torch's without its build's suffix."""
    return Versions(protocol=PROTOCOL, penstock=__version__, torch=version("torch").partition("+")[0])


def own_facts(incarnation: str, *, gpus: bool = True) -> HostFacts:
    """This host's facts, as they are now. A fact that cannot be found out is left out: none of them ends an engine.

    Without ``gpus`` no driver is asked, which may take seconds.
    """
    found, unlisted = cuda_devices() if gpus else ((), "")
    return HostFacts(
        name=label(platform.node()),
        incarnation=incarnation,
        versions=own_versions(),
        cores=min(usable_cores(), MOST_CORES),
        devices=(processor(), *found[: MOST_DEVICES - 1]),
        unlisted=label(unlisted),
    )


def own_uuid(device: str) -> str:
    """The UUID of this host's ``device``; empty for a processor, and for a GPU whose number has to do."""
    return "" if device == "cpu" else uuids_at_first().get(device, "")


@cache
def uuids_at_first() -> dict[str, str]:
    """The UUIDs by device when GPUs were first looked for: one that fails later changes the numbers of the others."""
    found, _ = cuda_devices()
    return {one.device: one.uuid for one in found}


def label(text: str) -> str:
    """The text as a ``Label``: on one line, and not too long."""
    return cut("".join(char if char.isprintable() else " " for char in text).strip(), MOST_LABEL)


def processor() -> DeviceFacts:
    """This host's processor and memory."""
    total, free = memory()
    return DeviceFacts(device="cpu", model=label(platform.machine()), memory=total, free=free)


def memory() -> tuple[int | None, int | None]:
    """Bytes of the host's memory, and of it those that are free, within the container's limit; None if unknown."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in MEMORY.read_text().splitlines():
            name, _, rest = line.partition(":")
            if (number := bytes_of(rest.removesuffix("kB").strip(), shift=10)) is not None:
                found[name] = number
    total, free = found.get("MemTotal") or None, found.get("MemAvailable")
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int(file.read_text()) for file in LIMITS)
        left = max(0, limit - max(0, used - reclaimable()))
        return limit if total is None else min(total, limit), left if free is None else min(free, left)
    return total, free


def reclaimable() -> int:
    """Bytes of files that the container's kernel has in its cache and gives up when they are needed; 0 if unknown.

    The container's use counts them: weights that were read once would otherwise leave no room for the stage that reads
    them. As in Kubernetes, files that were read more than once stay counted.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in STATISTICS.read_text().splitlines():
            name, _, rest = line.partition(" ")
            if name == "inactive_file" and (number := bytes_of(rest.strip(), shift=0)) is not None:
                return number
    return 0


def bytes_of(text: str, shift: int) -> int | None:
    """The count of bytes that a decimal number of KiB (``shift`` 10) or MiB (20) says; None for any other text."""
    return int(text) << shift if NUMBER.fullmatch(text) else None


class Gpu(NamedTuple):
    """A GPU as the driver lists it; memory in bytes, None where it does not say."""

    number: str
    uuid: str
    model: str
    memory: int | None = None
    free: int | None = None
    capability: tuple[int, int] | None = None
    divided: bool = False
    """Whether its parts (MIG) are used in its place."""


def cuda_devices() -> tuple[list[DeviceFacts], str]:
    """The GPUs that CUDA sees, and the reason why the driver lists none though there may be some; empty without one.

    nvidia-smi is asked rather than torch, which would keep a context on each GPU.
    """
    setting = os.environ.get(VISIBLE)
    gpus, unlisted = ([], "") if setting in HIDDEN else listed_gpus()
    found = [
        DeviceFacts(
            device=f"cuda:{i}",
            model=label(gpu.model),
            memory=gpu.memory,
            free=gpu.free,
            capability=gpu.capability,
            # CUDA sees a part in place of a GPU that is divided, and that has a UUID of its own.
            uuid=gpu.uuid if UUID.fullmatch(gpu.uuid) and not gpu.divided else "",
        )
        for i, gpu in enumerate(visible(gpus, setting))
    ]
    return found, "" if found else unlisted


def listed_gpus() -> tuple[list[Gpu], str]:
    """The GPUs in nvidia-smi's answer, or else the reason why it lists none; empty where there is none to list."""
    try:
        gpus, said = asked_gpus(FIELDS)
        if UNKNOWN_FIELD in said:
            gpus, said = asked_gpus(OLD_FIELDS)
    except FileNotFoundError:  # it comes with the driver
        return [], ""
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi has not answered within {QUERY_S:.0f} s"
    except OSError as error:
        return [], f"nvidia-smi cannot be run: {error.strerror}"
    # GPUs that are listed count also beside an error: one of several may be lost.
    return gpus, "" if gpus or said in ("", NONE_FOUND) else f"nvidia-smi says: {said}"


def asked_gpus(fields: Sequence[str]) -> tuple[list[Gpu], str]:
    """The GPUs that nvidia-smi lists, and the first line of its answer. Raises OSError and SubprocessError."""
    command = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    answer = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=QUERY_S,
        check=False,
    )
    gpus = [gpu for line in answer.stdout.splitlines() if (gpu := gpu_of(line, fields)) is not None]
    code = f"exit code {answer.returncode}" if answer.returncode else ""
    said = answer.stdout.strip() or answer.stderr.strip() or code
    return gpus, said.partition("\n")[0]


def gpu_of(line: str, fields: Sequence[str]) -> Gpu | None:
    """The GPU that a line of nvidia-smi tells; None if it is no such line.

    A field may read "[N/A]", "[Not Supported]", "[Insufficient Permissions]" or "[Unknown Error]".
    """
    told = dict(zip(fields, map(str.strip, line.split(",", len(fields) - 1)), strict=False))
    if len(told) < len(fields) or not NUMBER.fullmatch(told["index"]):
        return None
    total, free = bytes_of(told["memory.total"], shift=20) or None, bytes_of(told["memory.free"], shift=20)
    if total is None:
        total, free = memory() if UNIFIED.search(told["name"]) else (None, None)
    divided = told.get("mig.mode.current") == "Enabled"
    if divided:  # CUDA sees a part of it, whose memory is not told here
        total = free = None
    capability = CAPABILITY.fullmatch(told.get("compute_cap", ""))
    return Gpu(
        told["index"],
        told["uuid"],
        told["name"],
        total,
        free,
        None if capability is None else (int(capability[1]), int(capability[2])),
        divided,
    )


def visible(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """The GPUs that CUDA sees under ``setting`` (CUDA_VISIBLE_DEVICES), in its order; all if it is None.

    The list ends before the first entry that is no GPU, or is named twice
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars). The memory of a part of a GPU (MIG)
    is not known here.
    """
    if setting is None:
        return list(gpus)
    found: list[Gpu] = []
    for name in map(str.strip, setting.split(",")):
        named = [one for one in gpus if one.number == name or (name.startswith("GPU-") and one.uuid.startswith(name))]
        if name.startswith("MIG-"):
            named = [Gpu("", name, "part of a GPU")]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return found
