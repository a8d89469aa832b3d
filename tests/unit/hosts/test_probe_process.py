"""The environment of a probe's process."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.hosts.doctor import ProbeProcess
from penstock.hosts.probe import ProbeSpec


@pytest.mark.parametrize(("set_to", "order"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")])
def test_a_probe_numbers_gpus_as_the_hosts_facts_do(
    monkeypatch: pytest.MonkeyPatch, set_to: str | None, order: str
) -> None:
    """CUDA alone would begin with the fastest, so that the rates of one GPU were told of another."""
    began: list[dict[str, Any]] = []

    def start(command: list[str], **options: Any) -> SimpleNamespace:
        began.append(options)
        return SimpleNamespace(stdin=SimpleNamespace(write=len, flush=lambda: None))

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if set_to is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", set_to)
    ProbeProcess(ProbeSpec(name="a", session="s", bind="tcp://127.0.0.1:*", head="tcp://127.0.0.1:1"))
    (options,) = began
    assert options["env"]["CUDA_DEVICE_ORDER"] == order
    assert options["env"]["PATH"]
