"""Recorded answers of nvidia-smi, and a script that gives them, in front of the PATH.

Fields are those of ``facts.FIELDS``: index, uuid, memory.total, memory.free, compute_cap, mig.mode.current, name.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Final

import pytest

from penstock.hosts.facts import VISIBLE

GEFORCE: Final = """\
0, GPU-aa11, 24576, 23900, 8.6, [N/A], NVIDIA GeForce RTX 3090
1, GPU-ab22, 24576, 1200, 8.6, [N/A], NVIDIA GeForce RTX 3090
2, GPU-cc33, 8192, 8000, 7.5, [N/A], NVIDIA GeForce RTX 2080 SUPER
"""
H100_MIG: Final = """\
0, GPU-dd44, 81559, 80900, 9.0, Enabled, NVIDIA H100 80GB HBM3
1, GPU-ee55, [Insufficient Permissions], [Insufficient Permissions], 9.0, Enabled, NVIDIA H100 80GB HBM3
2, GPU-ff66, 81559, 80900, 9.0, Disabled, NVIDIA H100 80GB HBM3
"""
ORIN: Final = "0, GPU-5f3a, [N/A], [N/A], 8.7, [N/A], Orin (nvgpu)\n"
GB10: Final = "0, GPU-6b10, [N/A], [N/A], 12.1, [N/A], NVIDIA GB10\n"
ODD: Final = """\
0, GPU-0077, [Not Supported], [Unknown Error], [N/A], [Not Supported], NVIDIA A100, with a comma
1, GPU-0088, 16384, [GPU requires reset], seven.five, , Tesla T4
"""
REFUSED: Final = 'Field "compute_cap" is not a valid field to query.\n\n'
OLD: Final = "0, GPU-0099, 16280, 16000, Tesla P100, PCIE\n"
NO_PERMISSION: Final = "Failed to initialize NVML: Insufficient Permissions\n"
NO_DRIVER: Final = """\
NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that it is installed.

"""
NONE: Final = "No devices were found\n"


def install_driver(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str | bytes, code: int = 0, old: str | None = None
) -> None:
    """Have nvidia-smi answer with ``answer``, or with ``old`` to a question without fields that are new."""
    whole = answer.encode() if isinstance(answer, str) else answer
    (folder / "answer").write_bytes(whole)
    lines = [f"cat {shlex.quote(str(folder / 'answer'))}", f"exit {code}"]
    if old is not None:
        (folder / "old").write_text(old)
        lines.insert(0, f'case "$1" in *compute_cap*) ;; *) cat {shlex.quote(str(folder / "old"))}; exit 0;; esac')
    run_as_driver(folder, monkeypatch, lines)


def run_as_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """Have nvidia-smi be a shell script of these lines."""
    script = folder / "nvidia-smi"
    script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(VISIBLE, raising=False)
