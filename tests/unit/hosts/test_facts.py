"""The GPUs that a host reports."""

from __future__ import annotations

import subprocess

import pytest

from penstock.hosts import facts

LISTED = """0, GPU-aa11, NVIDIA H100, 80000, 70000
1, GPU-ab22, NVIDIA H100, 80000, 60000
2, GPU-cc33, NVIDIA L4, 24000, 20000
"""


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(command: tuple[str, ...], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout=LISTED)

    monkeypatch.setattr(subprocess, "run", answer)


@pytest.mark.parametrize(
    ("setting", "free"),
    [
        (None, [70000, 60000, 20000]),
        ("", []),
        ("-1", []),
        ("2,0", [20000, 70000]),
        ("0,7,1", [70000]),
        ("1,1", [60000]),
        ("GPU-cc, GPU-aa11", [20000, 70000]),
        ("GPU-a", []),
        ("MIG-77,1", [0, 60000]),
    ],
)
def test_gpus_are_those_that_cuda_sees_with_its_numbers(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, free: list[int]
) -> None:
    if setting is None:
        monkeypatch.delenv(facts.VISIBLE, raising=False)
    else:
        monkeypatch.setenv(facts.VISIBLE, setting)
    found = facts.cuda_devices()
    assert [one.free >> 20 for one in found] == free
    assert [one.device for one in found] == [f"cuda:{i}" for i in range(len(free))]


def test_a_gpu_is_told_with_its_model_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(facts.VISIBLE, "2")
    (found,) = facts.cuda_devices()
    assert (found.device, found.model, found.memory) == ("cuda:0", "NVIDIA L4", 24000 << 20)
