"""The demo's picture, drawn at moments chosen by the test."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from penstock.cluster import load_cluster
from penstock.engine.scheduler import Advance
from penstock.lab import race as race_module
from penstock.lab.demo import CHAT_WORDS
from penstock.lab.race import PENSTOCK, PLAIN, Race, Run, printable
from tests.unit.lab.demo.drawing import batch, node


def test_a_run_is_shown_again_at_its_own_pace() -> None:
    run = Run(PLAIN, started=10.0)
    run.add(11.0, 1, "a", drafted=False)
    run.add(13.0, 3, "abc", drafted=True)
    assert run.styled(0.5).plain == ""
    assert run.styled(1.5).plain == "a"
    assert run.styled(3.0).plain == "abc"
    assert run.pace(0.5) == "0 tokens"
    assert run.pace(1.5) == "1 token"
    assert run.pace(3.0) == "3 tokens · 1.0 tokens/s"
    assert run.pace(5.0) == "3 tokens · 0.5 tokens/s", "a run that is not over grows slower while it waits"
    run.finished = True
    assert run.pace(2.9) == "1 token"
    assert run.pace(5.0) == "3 tokens in 3.0 s · 1.0 tokens/s"


def test_control_characters_are_not_drawn() -> None:
    assert printable("a\x1b[2J\x0cb\nc\u00e9") == "a[2Jb\nc\u00e9"


SIZES = [(80, 24), (120, 40), (200, 60)]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [100.0]
    monkeypatch.setattr(race_module.time, "monotonic", lambda: moment[0])
    return moment


def race_on(width: int, height: int) -> tuple[Race, Console]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    return Race(console, load_cluster("demo"), ["a prompt\n" * 3], CHAT_WORDS), console


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_picture_fits_the_terminal(now: list[float], width: int, height: int) -> None:
    race, console = race_on(width, height)
    assert "a prompt" in drawn(console, race), "also while the stages start"
    for strategy in (PLAIN, PENSTOCK):
        assert "emulated" in drawn(console, race)
        race.begin(strategy, 0, 1)
        race.submitted(batch(0, {5: [1], 6: list(range(2, 34))}), now[0])
        advance(race, now[0] + 0.5, "some text\n" * 40, finished=False)
        now[0] += 0.6
        picture = drawn(console, race)
        assert "33" in picture
        assert "○" * 28 in picture
        assert "some text" in picture
        advance(race, now[0], "some text\n" * 40 + "end", finished=True)
    assert "replay" in drawn(console, race)


def test_the_last_frame_has_one_clock(now: list[float]) -> None:
    race, console = race_on(80, 24)
    for strategy, seconds in ((PENSTOCK, 2.0), (PLAIN, 6.0)):
        race.begin(strategy, 0, 1)
        advance(race, now[0] + 1.0, "one", finished=False)
        advance(race, now[0] + seconds, "one two", finished=True)
        now[0] += seconds
    with console.capture() as capture:
        console.print(race.texts())
    last = capture.get()
    assert "Both after 6.0 s." in last
    assert last.count(" in 2.0 s") == last.count(" in 6.0 s") == 1
    assert len(re.findall(r"\d s\b", last)) == 3, "the clock, and the time of each run"


def test_a_small_terminal_shows_the_texts_first(now: list[float]) -> None:
    race, console = race_on(60, 12)
    race.begin(PLAIN, 0, 1)
    advance(race, now[0], "some text\n" * 40, finished=False)
    with console.capture() as capture:
        console.print(race)
    first = capture.get().splitlines()[:12]
    assert any("some text" in line for line in first)
    assert any("Prompt 1 of 1" in line for line in first)


def test_only_what_was_drafted_has_a_legend(now: list[float]) -> None:
    race, console = race_on(80, 24)
    race.begin(PLAIN, 0, 1)
    assert "nothing is drafted" in drawn(console, race)
    race.begin(PENSTOCK, 0, 1)
    assert "○ drafted" in drawn(console, race)


def test_the_next_run_starts_with_empty_boards_and_no_tree(now: list[float]) -> None:
    race, console = race_on(80, 24)
    race.begin(PLAIN, 0, 1)
    race.submitted(batch(0, {5: [1], 6: [2, 3]}), now[0])
    now[0] += 0.01
    assert "▸" in drawn(console, race)
    race.begin(PENSTOCK, 0, 1)
    picture = drawn(console, race)
    assert "▸" not in picture
    assert picture.count("idle") == 4


def test_the_texts_stay_when_the_race_is_over(now: list[float]) -> None:
    race, console = race_on(80, 24)
    for strategy in (PLAIN, PENSTOCK):
        race.begin(strategy, 0, 1)
        advance(race, now[0] + 1, "text\n" * 5, finished=True)
    with console.capture() as capture:
        console.print(race.texts())
    lines = capture.get().splitlines()
    assert len(lines) == 2 + 3 + 5 + 1 + 1, "frame, prompt, text, the line after it, and the clock"
    assert "board" not in capture.get()


def test_the_next_prompt_waits_for_people_to_look(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    monkeypatch.setattr(race_module.time, "sleep", paused.append)
    race, _ = race_on(80, 24)
    race.begin(PLAIN, 0, 1)
    race.begin(PENSTOCK, 0, 1)
    assert paused == []
    race.begin(PLAIN, 0, 1)
    assert paused == [race_module.PAUSE]


def drawn(console: Console, race: Race) -> str:
    with console.capture() as capture:
        console.print(race)
    picture = capture.get()
    assert all(len(line) <= console.width for line in picture.splitlines())
    assert picture.count("\n") <= console.height
    return picture


def advance(race: Race, at: float, text: str, finished: bool) -> None:
    output = SimpleNamespace(output=SimpleNamespace(text=text), detokenize_pending=lambda: None)
    request: Any = SimpleNamespace(output=output, produced=5, metrics=SimpleNamespace(accepted=1, misses=1))
    done = Advance(committed=[node(2, 6)], hits=1, finished="length" if finished else None)  # type: ignore[arg-type]
    race.advanced(request, done, at)
