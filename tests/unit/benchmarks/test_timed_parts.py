"""Parts that end well, fail, crash, overrun and do not fit: each is named, and its figures are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.shared.root import ROOT

pytestmark = pytest.mark.processes

SECONDS = 120
"""Time of the parts: 7 s for the one that never ends."""


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.unit.benchmarks.sample_parts", "--out", str(folder), *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def told(folder: Path) -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text("utf-8")) for file in folder.glob("*")}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Any]:
    folder = tmp_path_factory.mktemp("parts")
    done = run(folder, "--seconds", str(SECONDS))
    return done, told(folder)


def test_every_part_is_named_with_its_outcome(outcome: Any) -> None:
    done, found = outcome
    assert {name: one["outcome"] for name, one in found.items()} == {
        "endless": "overran",
        "good": "ended",
        "wrong": "failed",
        "crashing": "failed",
        "crowded": "left out",
    }
    assert done.returncode == 1, done.stderr
    assert "1 of 5 parts ended well" in done.stdout
    assert "overran: endless; failed: wrong, crashing; left out: crowded" in done.stdout
    for name, one in found.items():
        assert one.keys() >= {"part", "date", "versions", "figures", "failed", "left_out", "seconds", "share_s"}, name


def test_figures_from_before_an_error_are_kept_with_it(outcome: Any) -> None:
    _, found = outcome
    assert found["wrong"]["error"] == "RuntimeError: all is lost"
    assert "last words" in found["crashing"]["error"]
    assert found["wrong"]["figures"] == found["crashing"]["figures"] == {"before": 1}


def test_an_error_within_a_part_ends_nothing_else_in_it(outcome: Any) -> None:
    done, found = outcome
    good = found["good"]
    assert good["figures"] == {"answer": 42, "environment": "1"}
    assert good["failed"] == {"odd": "ValueError: an odd number"}
    assert good["left_out"] == {"large": "larger than what is there"}
    assert "--part" not in good["command"]
    for line in ("found answer, environment", "failed: odd: ValueError: an odd number", "left out: large: larger"):
        assert line in done.stdout


def test_what_a_killed_part_had_started_is_gone_before_the_next(outcome: Any) -> None:
    _, found = outcome
    assert found["endless"]["error"].startswith("killed after")
    assert not runs(found["endless"]["figures"]["started"])


def runs(pid: int) -> bool:
    """Whether a process runs. One that has ended stays until its parent, now the system's first process, takes note."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_part_may_run_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "good")
    assert (done.returncode, [*told(tmp_path)]) == (0, ["good"])


def test_a_part_without_time_is_left_out(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "good", "--seconds", "1")
    good = told(tmp_path)["good"]
    assert (done.returncode, good["outcome"], good["figures"]) == (1, "left out", {})
    assert good["error"].endswith("s were left")


def test_an_unknown_part_is_refused_by_name(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "best")
    assert done.returncode == 2
    assert "'best' is no part; there are endless, good" in done.stderr
