"""The demo's choice of screen: the live picture where the terminal can show it, else lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cluster import load_cluster, plain_step_seconds
from penstock.lab import demo
from penstock.lab.race import PENSTOCK, PLAIN, Race


@pytest.fixture
def screens(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The kinds of screen on which ``run_demo`` shows its runs; no run takes place."""
    seen: list[type] = []

    def compare(cluster: Any, scene: Any, screen: Any) -> list[Any]:
        seen.append(type(screen))
        return []

    monkeypatch.setattr(demo, "compare", compare)
    monkeypatch.setattr(demo, "print_report", lambda *_: None)
    monkeypatch.setattr(demo, "summary", lambda runs: {})
    return seen


@pytest.mark.parametrize(
    ("terminal", "term", "as_json", "screen"),
    [
        ("1", "xterm", False, Race),
        ("1", "dumb", False, demo.Lines),
        ("0", "xterm", False, demo.Lines),
        ("1", "xterm", True, demo.Lines),
    ],
)
def test_the_picture_is_live_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch, screens: list[type], terminal: str, term: str, as_json: bool, screen: type
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    monkeypatch.setenv("TERM", term)
    demo.run_demo(as_json, embedded=True)
    assert screens == [screen]


def test_the_live_picture_leaves_the_terminal_as_it_was(
    monkeypatch: pytest.MonkeyPatch, screens: list[type], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    demo.run_demo(as_json=False, embedded=True)
    written = capsys.readouterr().out
    entered, left = written.index("\x1b[?1049h"), written.index("\x1b[?1049l")
    assert entered < left < written.rindex("plain pipeline"), "the texts are printed once more on the screen that stays"
    assert written.index("\x1b[?25l") < written.index("\x1b[?25h")
    assert "\x1b[2J" not in written
    assert "\x1b[2K" not in written


def runs(pace: float = 1.0, overruns: float = 0.0) -> list[Any]:
    """A plain run whose tokens take ``pace`` times what the boards need, and one of Penstock's with overruns."""
    speed = 1 / (pace * plain_step_seconds(load_cluster("demo")))
    return [
        SimpleNamespace(strategy=PLAIN, tokens_per_second=speed, overrun_fraction=0.0),
        SimpleNamespace(strategy=PENSTOCK, tokens_per_second=4 * speed, overrun_fraction=overruns),
    ]


def test_overruns_are_printed_always() -> None:
    assert demo.overrun_words(runs(overruns=0.381)).endswith(": 0.0% (plain pipeline) and 38.1% (Penstock).")


@pytest.mark.parametrize(
    ("pace", "overruns", "said"),
    [
        (1.0, 0.0, ""),
        (1.04, 0.049, ""),
        (1.0, 0.06, "6% of the batches and drafts took longer than on a modelled board"),
        (1.2, 0.0, "plain tokens took 20% longer than the boards need for them"),
        (1.2, 0.06, "6% of the batches and drafts took longer than on a modelled board, and plain tokens took 20%"),
    ],
)
def test_a_busy_host_is_named_where_the_figures_suffer(pace: float, overruns: float, said: str) -> None:
    words = demo.busy_words(load_cluster("demo"), runs(pace, overruns))
    assert words.startswith(said)
    assert bool(words) is bool(said)
