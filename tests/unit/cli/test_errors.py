"""Ctrl-C ends a command, wherever it finds it; what the system refuses is one line."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import typer
from matplotlib.figure import Figure

from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.cli.options import INTERRUPTED, REMEDIES, UNREAD, reported
from penstock.core import ConfigError, PenstockError
from penstock.lab.plots import save
from penstock.models.loader import read_module
from tests.checkpoints import make_checkpoint
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
    """Rich prints a table, a command its own text, and Typer the help."""
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


SHORT: Final = [
    (MemoryError(), "ulimit -v"),
    (MemoryError("Unable to allocate 3.00 GiB for an array"), "ulimit -v"),
    (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "ulimit -v"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."), "ulimit -v"),
    (RuntimeError("can't start new thread"), "ulimit -u"),
    (OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "ulimit -u"),
]
"""Errors of Python, numpy, the system and torch where memory or a thread is refused, and the limit that helps."""


@pytest.mark.parametrize(("error", "limit"), SHORT, ids=str)
def test_what_the_system_lacks_is_no_fault_of_the_models(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
    limit: str,
) -> None:
    with pytest.raises(typer.Exit) as ended, reported():
        raise error
    said = capsys.readouterr().err
    assert (ended.value.exit_code, said.count("\n")) == (1, 1)
    assert said.startswith("penstock: error: ")
    assert limit in said

    def refuse(*_: object, **__: object) -> None:
        raise error

    checkpoint = open_checkpoint(str(make_checkpoint(tmp_path, "llama")))
    for place in ("penstock.checkpoint.tensors.safe_open", "penstock.models.loader.check_fits"):
        with monkeypatch.context() as short:
            short.setattr(place, refuse)
            with pytest.raises(PenstockError, match=limit) as found:
                read_module(checkpoint, 0, checkpoint.num_layers, "float32", "cpu")
        assert not isinstance(found.value, ConfigError)
        assert "download it again" not in str(found.value)


def test_an_error_of_another_kind_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="a bug"), reported():
        raise RuntimeError("a bug")


def test_a_plot_for_which_there_is_no_room_is_removed_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figure = Figure()
    monkeypatch.setattr(figure, "savefig", partial(fill, tmp_path / "a.png"))
    with pytest.raises(OSError, match=r"No space left .*a\.png"):
        save(figure, tmp_path / "a.png")
    assert not [*tmp_path.iterdir()]


def fill(file: Path, *_: object) -> None:
    """Write nothing into a new file, as on a full disk."""
    file.touch()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
