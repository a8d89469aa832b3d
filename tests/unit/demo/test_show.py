"""Which screen the demo uses: the live picture on terminals that can show it, lines elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.demo import show
from penstock.demo.race import Race


@pytest.fixture
def screens(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The kinds of screens that ``run_demo`` shows its runs on; nothing runs."""
    seen: list[type] = []

    def compare(cluster: Any, prompts: Any, screen: Any) -> list[Any]:
        seen.append(type(screen))
        return []

    monkeypatch.setattr(show, "compare", compare)
    monkeypatch.setattr(show, "print_report", lambda *_: None)
    monkeypatch.setattr(show, "summary", lambda runs: {})
    return seen


@pytest.mark.parametrize(
    ("terminal", "term", "as_json", "screen"),
    [
        ("1", "xterm", False, Race),
        ("1", "dumb", False, show.Lines),
        ("0", "xterm", False, show.Lines),
        ("1", "xterm", True, show.Lines),
    ],
)
def test_the_picture_is_live_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch, screens: list[type], terminal: str, term: str, as_json: bool, screen: type
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    monkeypatch.setenv("TERM", term)
    show.run_demo(as_json)
    assert screens == [screen]


def test_the_live_picture_leaves_the_terminal_as_it_was(
    monkeypatch: pytest.MonkeyPatch, screens: list[type], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    show.run_demo(as_json=False)
    written = capsys.readouterr().out
    entered, left = written.index("\x1b[?1049h"), written.index("\x1b[?1049l")
    assert entered < left < written.rindex("plain pipeline"), "the texts are printed once more on the screen that stays"
    assert written.index("\x1b[?25l") < written.index("\x1b[?25h")
    assert "\x1b[2J" not in written
    assert "\x1b[2K" not in written
