"""The output that reaches the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.clients.chat import MARKDOWN, PlainScreen, RichScreen, Tail, clean, laid_out


def console(height: int = 10) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=40, height=height, highlight=False)


def written(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def test_a_text_cannot_steer_the_terminal() -> None:
    assert clean("a\x1b[2Jb\x07\r\n\tc\x9b0m") == "a[2Jb\n\tc0m"


def test_a_growing_answer_shows_its_last_lines_only() -> None:
    tail = Tail()
    tail.add("\n\n".join(f"line {i}" for i in range(50)))
    out = Console(file=io.StringIO(), width=40, height=10)
    out.print(tail)
    lines = written(out).splitlines()
    assert len(lines) <= 10 - 2 + 1
    assert lines[-1].strip() == "line 49"


def test_in_the_end_all_of_the_answer_is_there() -> None:
    out = console()
    with RichScreen(out).answering() as show:
        for i in range(50):
            show(f"line {i}\n\n")
    assert all(f"line {i}" in written(out) for i in range(50))


SOURCE = """
# an area, [b]exactly[/b]
import math

def area(r, **options):
    \"\"\"Of a circle.

      - r: its radius
    \"\"\"
    return math.pi * r**2 + scaled(**options, **{})
"""


def test_source_code_keeps_its_lines_and_every_character() -> None:
    out = Console(file=io.StringIO(), width=80)
    out.print(laid_out(SOURCE))
    assert written(out) == SOURCE.lstrip("\n")


@pytest.mark.parametrize(
    "text",
    [
        "Use this:\n\n```python\nx = 1\n```\n",
        "## Steps\nfirst",
        "- one\n- two",
        "Three things:\n1. one",
        "It is **very bold**.",
        "See [the docs](https://example.org/docs).",
    ],
)
def test_what_is_evidently_markdown(text: str) -> None:
    assert MARKDOWN.search(text)


def test_brackets_in_words_are_no_markup() -> None:
    out = console()
    RichScreen(out).warn("stop is ['a']; it has to be [b]text[/b]")
    assert "[b]text[/b]" in written(out)


def test_plain_has_text_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    screen = PlainScreen()
    with screen.answering() as show:
        show("# a")
        show("\x1b[1mb")
    screen.say("not for a pipe")
    assert capsys.readouterr().out == "# a[1mb\n"
