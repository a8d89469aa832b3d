"""Ctrl-C ends a command, wherever it finds it."""

from __future__ import annotations

import signal
import sys
import time

import pytest
import typer

from penstock.cli.options import INTERRUPTED, reported


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
