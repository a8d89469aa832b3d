"""Folders for a while: gone with their owner, or cleared by the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.files import LOCK, SETTLED_S, let_go, make_scratch, scratch_folder

OWNER = """
import sys
from penstock.files import lasting_scratch
print(lasting_scratch("penstock-of-mine-"), flush=True)
sys.stdin.read()
"""


def aged(folder: Path) -> None:
    then = time.time() - 2 * SETTLED_S
    os.utime(folder / LOCK, (then, then))


@pytest.mark.parametrize("signal", ["KILL", "USR1", "TERM"])
def test_what_a_killed_process_left_is_cleared_by_the_next_one(tmp_path: Path, signal: str) -> None:
    options: Any = {"env": os.environ | {"TMPDIR": str(tmp_path)}, "text": True}
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        (left / "socket").write_text("something")
        aged(left)
        with scratch_folder(parent=tmp_path):
            assert left.is_dir(), "its owner lives"
        subprocess.run(["kill", f"-{signal}", str(owner.pid)], check=True)
    assert left.is_dir()
    with scratch_folder(parent=tmp_path) as mine:
        assert [*tmp_path.iterdir()] == [mine]
    assert [*tmp_path.iterdir()] == []


def test_a_lasting_folder_ends_with_its_process(tmp_path: Path) -> None:
    options: Any = {"env": os.environ | {"TMPDIR": str(tmp_path)}, "text": True, "check": True}
    subprocess.run([sys.executable, "-c", OWNER], input="", stdout=subprocess.DEVNULL, **options)
    assert [*tmp_path.iterdir()] == []


def test_what_is_new_or_nobody_of_ours_is_left_alone(tmp_path: Path) -> None:
    (other := tmp_path / "penstock-other").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / LOCK).touch()
    aged(elsewhere)
    (link := tmp_path / "penstock-link").symlink_to(elsewhere)
    new = make_scratch("penstock-", tmp_path)
    let_go(new)
    let_go(new)
    with scratch_folder(parent=tmp_path):
        assert all(folder.exists() for folder in (other, elsewhere, link, new))
    aged(new)
    with scratch_folder(parent=tmp_path):
        assert not new.exists()
