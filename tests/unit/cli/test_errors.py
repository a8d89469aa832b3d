"""Ctrl-C ends a command, wherever it finds it; what the system refuses is one line."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from penstock.cli.options import INTERRUPTED, REMEDIES, UNREAD, reported
from tests.serving import PENSTOCK


class InterruptedWhileDeleted:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def deletes_and_goes_on() -> None:
    deleted = InterruptedWhileDeleted()
    del deleted
    for _ in range(200):
        time.sleep(0.05)
    pytest.fail("the command goes on")


def test_ctrl_c_amid_a_destructor_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.unraisablehook
    with pytest.raises(typer.Exit) as ended, reported():
        deletes_and_goes_on()
    assert ended.value.exit_code == INTERRUPTED
    assert capsys.readouterr().err == ""
    assert sys.unraisablehook is before


def test_other_errors_amid_a_destructor_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing:
        def __del__(self) -> None:
            raise ValueError("from a destructor")

    with reported():
        failing = Failing()
        del failing
    assert "from a destructor" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [*REMEDIES, errno.EIO])
def test_a_file_that_cannot_be_had_is_named_with_what_helps(capsys: pytest.CaptureFixture[str], kind: int) -> None:
    with pytest.raises(typer.Exit) as ended, reported():
        raise OSError(kind, os.strerror(kind), "/some/where")
    assert ended.value.exit_code == 1
    said = capsys.readouterr().err
    assert said.startswith(f"penstock: error: /some/where: {os.strerror(kind)}; ")
    assert said.count("\n") == 1


def test_for_those_who_debug_it_has_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    with pytest.raises(FileNotFoundError), reported():
        Path("/some/where").read_text()


@pytest.mark.parametrize("command", [["simulate", "--help"], ["list", "--names"]])
def test_a_full_disk_behind_the_output_is_one_line(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([PENSTOCK, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "penstock: error: No space left on device; free some space there\n"


@pytest.mark.parametrize("command", [["list", "--names"], ["help", "--man"], ["plan", "--help"]])
def test_a_reader_that_leaves_ends_a_command_quietly(command: list[str]) -> None:
    """Whoever prints: rich a table, the command itself, Typer its help."""
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([PENSTOCK, *command], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (UNREAD, "")


def test_homes_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    home = {**os.environ, "HOME": str(tmp_path / "file"), "XDG_CONFIG_HOME": ""}
    ended = subprocess.run([PENSTOCK, "keys", "new"], capture_output=True, text=True, env=home, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"penstock: error: {tmp_path / 'file'}")
    assert ended.stderr.count("\n") == 1
