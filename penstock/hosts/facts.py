"""Facts about a host: versions, cores, devices. Every head is told, and compares versions before it starts anything."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from penstock.hosts.cores import usable_cores
from penstock.messages import PROTOCOL, Index, Label, Word

MEMORY: Final = Path("/proc/meminfo")
LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))
"""A container's memory (cgroup v2): bytes that it may use, or "max", and bytes that it uses."""
CUDA_QUERY: Final = (
    "nvidia-smi",
    "--query-gpu=index,uuid,name,memory.total,memory.free",
    "--format=csv,noheader,nounits",
)
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""The variable that names the GPUs CUDA may see: driver indices or beginnings of UUIDs. CUDA numbers them from 0."""
QUERY_S: Final = 5.0
"""Seconds that the driver may take to answer."""


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Versions that have to be the same on every host, so that stages understand each other and compute alike."""

    protocol: Index
    penstock: Label
    torch: Label
    """The version without the build's suffix ("+cu126")."""


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A device by torch's name, "cpu" or "cuda:N", and its memory in bytes."""

    device: Label
    model: Label
    memory: Word
    free: Word


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A host's facts. ``incarnation`` changes each time the agent starts; ``devices`` begin with the processor."""

    name: Label
    incarnation: Label
    versions: Versions
    cores: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    devices: Annotated[tuple[DeviceFacts, ...], msgspec.Meta(min_length=1, max_length=256)]

    def device(self, name: str) -> DeviceFacts | None:
        return next((one for one in self.devices if one.device == name), None)


def own_versions() -> Versions:
    return Versions(protocol=PROTOCOL, penstock=version("penstock"), torch=version("torch").partition("+")[0])


def own_facts(incarnation: str) -> HostFacts:
    """This host's facts, as they are now."""
    return HostFacts(
        name=platform.node(),
        incarnation=incarnation,
        versions=own_versions(),
        cores=usable_cores(),
        devices=(processor(), *cuda_devices()),
    )


def processor() -> DeviceFacts:
    total, free = memory()
    return DeviceFacts(device="cpu", model=platform.machine(), memory=total, free=free)


def memory() -> tuple[int, int]:
    """Bytes of the host's memory, and of it those that are free, within the container's limit; 0 if it cannot say."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in MEMORY.read_text().splitlines():
            name, _, rest = line.partition(":")
            found[name] = 1024 * int(rest.split()[0])
    total, free = found.get("MemTotal", 0), found.get("MemAvailable", 0)
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int(file.read_text()) for file in LIMITS)
        return min(total, limit), min(free, max(0, limit - used))
    return total, free


class Gpu(NamedTuple):
    """A GPU as the driver lists it; memory in bytes."""

    number: str
    uuid: str
    model: str
    memory: int
    free: int


def cuda_devices() -> list[DeviceFacts]:
    """The GPUs that nvidia-smi lists. It is asked rather than torch, which would keep a context on each GPU."""
    try:
        answer = subprocess.run(CUDA_QUERY, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = [gpu_of(line) for line in answer.splitlines() if line.count(",") == 4]
    return [
        DeviceFacts(device=f"cuda:{i}", model=gpu.model, memory=gpu.memory, free=gpu.free)
        for i, gpu in enumerate(visible(gpus, os.environ.get(VISIBLE)))
    ]


def gpu_of(line: str) -> Gpu:
    number, uuid, model, total, free = (part.strip() for part in line.split(","))
    return Gpu(number, uuid, model, int(total) << 20, int(free) << 20)  # nvidia-smi states MiB


def visible(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """The GPUs that CUDA sees under ``setting`` (CUDA_VISIBLE_DEVICES), in its order; all if it is None.

    The list ends before the first entry that is no GPU, or is named twice
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars). The memory of a part of a GPU (MIG)
    is not known here: 0.
    """
    if setting is None:
        return list(gpus)
    found: list[Gpu] = []
    for name in map(str.strip, setting.split(",")):
        named = [one for one in gpus if one.number == name or (name.startswith("GPU-") and one.uuid.startswith(name))]
        if name.startswith("MIG-"):
            named = [Gpu("", name, "part of a GPU", 0, 0)]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return found
