"""Reading a line on a terminal that cannot move its cursor; elsewhere the integration tests type at a real one."""

from __future__ import annotations

import io

import pytest

from penstock.terminal import LineEditor


def test_a_dumb_terminal_gets_the_prompt_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\nlast"))
    shown = io.StringIO()
    editor = LineEditor(shown)
    assert [editor.read("> ") for _ in range(4)] == ["one", "", "last", None]
    assert shown.getvalue() == "> > > > "
