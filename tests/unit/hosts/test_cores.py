"""The cores that belong to this process, and how stages share them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.hosts import facts
from penstock.hosts.facts import shared_threads, usable_cores


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Four hardware threads of two cores, as the system's files say, and no container."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(facts, "CPUS", tmp_path)
    monkeypatch.setattr(facts, "QUOTA", tmp_path / "cpu.max")
    for cpu in range(4):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text("0,2\n" if cpu % 2 == 0 else "1,3\n")
    return tmp_path


def test_two_hardware_threads_are_one_core(host: Path) -> None:
    assert usable_cores() == 2


def test_a_system_that_tells_nothing_of_cores(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "CPUS", host / "nowhere")
    assert usable_cores() == 4


@pytest.mark.parametrize(
    ("limit", "found"), [("max 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("800000 100000", 2), ("?", 2)]
)
def test_a_containers_share(host: Path, limit: str, found: int) -> None:
    (host / "cpu.max").write_text(limit + "\n")
    assert usable_cores() == found


@pytest.mark.parametrize(
    ("stated", "found", "threads"),
    [
        ([None], 2, (2,)),
        ([None, None], 2, (1, 1)),
        ([None, None, None], 2, (1, 1, 1)),
        ([None, None, None], 8, (2, 2, 2)),
        ([4, None, None], 8, (4, 2, 2)),
        ([8, None], 4, (8, 1)),
        ([3], 2, (3,)),
    ],
)
def test_shares(stated: list[int | None], found: int, threads: tuple[int, ...]) -> None:
    assert shared_threads(stated, found) == threads
