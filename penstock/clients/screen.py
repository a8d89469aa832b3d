"""A chat's output: formatted for a person at a terminal, plain text for a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Protocol

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All control characters but tab and line feed: a model's text must not control the terminal."""
MARKDOWN: Final = re.compile(
    r"^ {0,3}(?:```|~~~)"  # a fence
    r"|^#{2,6} \S"  # a heading; one # may be a comment
    r"|^(?:[-*+]|\d+[.)]) \S"  # a list
    r"|(?<![\w*(,])\*\*\w[^*\n]*(?<![\s,])\*\*(?![\w*])"  # bold words, and no powers or keyword arguments
    r"|\]\(https?:",  # a link
    re.MULTILINE,
)
"""Signs that a text is Markdown; other text, such as source code, would lose its line breaks as Markdown."""
MARGIN: Final = 2
"""Lines of the terminal that a growing answer leaves free: it would flicker if it filled the last one."""


class Screen(Protocol):
    interactive: bool

    def read(self, prompt: str) -> str | None:
        """The next line without its end; None when there is no more."""

    def answering(self) -> AbstractContextManager[Callable[[str], None]]:
        """A context for one answer; it yields a function that takes each new piece of the text."""

    def say(self, words: str) -> None:
        """Show information for a person; a pipe gets none."""

    def warn(self, words: str) -> None:
        """Show an error."""


def screen_for_this_terminal() -> Screen:
    """A RichScreen where a person reads and types, else a PlainScreen."""
    return RichScreen() if sys.stdin.isatty() and sys.stdout.isatty() else PlainScreen()


def clean(text: str) -> str:
    return CONTROLS.sub("", text)


def laid_out(text: str) -> RenderableType:
    """Markdown if the text looks like it, else the text unchanged but for blank lines around it."""
    return Markdown(text) if MARKDOWN.search(text) else Text(text.strip("\n"))


class PlainScreen:
    """A screen for pipes: lines from stdin; answers, each ended by a line feed, to stdout; errors to stderr."""

    interactive = False

    def read(self, prompt: str) -> str | None:
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None

    @contextmanager
    def answering(self) -> Iterator[Callable[[str], None]]:
        def show(text: str) -> None:
            sys.stdout.write(clean(text))
            sys.stdout.flush()

        try:
            yield show
        finally:
            show("\n")

    def say(self, words: str) -> None:
        pass

    def warn(self, words: str) -> None:
        print(f"penstock: {clean(words)}", file=sys.stderr)


class RichScreen:
    """A screen for a terminal: the last lines of an answer while it grows, all of it at the end."""

    interactive = True

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)

    def read(self, prompt: str) -> str | None:
        import readline  # noqa: F401  (input() then has history and arrow keys)

        try:
            return input(prompt)
        except EOFError:
            self._console.print()
            return None

    @contextmanager
    def answering(self) -> Iterator[Callable[[str], None]]:
        tail = Tail()
        try:
            with Live(tail, console=self._console, refresh_per_second=8, transient=True):
                yield tail.add
        finally:
            self._console.print(laid_out(tail.text))

    def say(self, words: str) -> None:
        if words:
            self._console.print(words, style="dim", markup=False)

    def warn(self, words: str) -> None:
        self._console.print(clean(words), style="red", markup=False)


class Tail:
    """A growing text, of which as many last lines are shown as fit."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, text: str) -> None:
        self.text += clean(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(laid_out(self.text), options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - MARGIN) :]:
            yield from line
            yield Segment.line()
