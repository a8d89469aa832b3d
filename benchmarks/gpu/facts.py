"""The part ``facts``: the device as its driver describes it, and the bounds of its speed, measured."""

from __future__ import annotations

import argparse
import os
import subprocess
from typing import Any, Final

import msgspec
import torch

from benchmarks.gpu.devices import copy_bandwidth, is_gpu, product_rate, read_bandwidth
from benchmarks.gpu.sizes import sizes_of
from benchmarks.shared.measured import processor
from benchmarks.shared.timed_parts import Findings
from penstock.hosts.facts import own_facts

ASKED: Final = (
    *("name", "driver_version", "compute_cap", "mig.mode.current", "memory.total", "memory.free", "power.limit"),
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("pcie.link.gen.current", "pcie.link.width.current"),
)
"""Properties of each GPU that ``nvidia-smi`` is asked for, one by one: a name that an older one does not know costs
that name alone."""
QUERY_S: Final = 5.0


def measure(options: argparse.Namespace, findings: Findings) -> None:
    sizes, device = sizes_of(options), options.device
    findings.add("torch", torch_facts())
    with findings.trying("host"):
        findings.add("host", {"processor": processor(), **msgspec.to_builtins(own_facts(""))})
    if is_gpu(device):
        findings.add("device", device_facts(device))
        findings.add("driver", {name: asked(name) for name in ASKED})
    with findings.trying("read"):
        findings.add("read_gb_s", read_bandwidth(device, sizes.read_bytes, sizes.repeats) / 1e9)
    with findings.trying("copy"):
        findings.add("copy_gb_s", copy_bandwidth(device, sizes.read_bytes, sizes.repeats) / 1e9)
    for name in ("bfloat16", "float32"):
        with findings.trying(name):
            rate = product_rate(device, getattr(torch, name), sizes.square, sizes.repeats)
            findings.add(f"{name}_tflop_s", rate / 1e12)


def torch_facts() -> dict[str, Any]:
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def device_facts(device: str) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "memory": found.total_memory,
        "capability": f"{found.major}.{found.minor}",
        "processors": found.multi_processor_count,
        "devices": torch.cuda.device_count(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "bfloat16": torch.cuda.is_bf16_supported(),
    }


def asked(name: str) -> list[str] | None:
    """The driver's answer for each GPU; None where there is no ``nvidia-smi``, or it does not know the name."""
    command = ["nvidia-smi", f"--query-gpu={name}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
