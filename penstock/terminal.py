"""A terminal: words below answers, tables of figures, progress bars, and the editor of a line that a person types."""

from __future__ import annotations

import os
import sys
import threading
from copy import copy
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession


# -------------------------------------------------------------------------------------------------------------- answers
# The words below an answer in a terminal: how it ended, its gain over plain decoding, and what exactness means.

CUT, FULL, EARLY = "cut", "full", "early"
"""Ends that a reader has to know of: at the limit on tokens, at the end of the model's context, and early otherwise."""
USUAL: Final = (None, "stop", "tool_calls", "function_call")
"""Finish reasons of answers that ended by themselves; None where a server gives none."""
EXACT: Final = "Drafts change the speed alone: the text is the one that plain decoding gives, token for token."
"""The words for numerics "exact"."""
NEARLY: Final = f"{EXACT[:-1]}, unless rounding decides between two that are nearly tied."
"""The words for numerics "fast"."""
MEANINGS: Final = {"exact": EXACT, "fast": NEARLY}
"""The words for each value of ``LLM.numerics``."""


def end_of(finish_reason: str | None, prompt_tokens: int, tokens: int, longest: int | None) -> str | None:
    """``CUT``, ``FULL`` or ``EARLY``; None for an answer that ended by itself.

    ``longest`` is the most tokens that prompt and answer may have together, None if that is not known.
    """
    if finish_reason in USUAL:
        return None
    if finish_reason != "length":
        return EARLY
    return FULL if longest is not None and prompt_tokens + tokens >= longest else CUT


def end_words(end: str, tokens: int, longest: int | None, finish_reason: str | None) -> str:
    """An end in words, for example ``cut at 128 tokens``. What to do about it differs from command to command."""
    if end == EARLY:
        return f"ended early: {finish_reason}"
    return f"the context is full: {longest} tokens" if end == FULL else f"cut at {tokens} tokens"


def gain_words(speed_up: float) -> str:
    """A measured speed in proportion to that of plain decoding: ``1.8 times plain``."""
    return f"{speed_up:.1f} times plain"


# --------------------------------------------------------------------------------------------------------------- tables
# Tables of figures on a terminal: as many whole columns as its width has room for.

LONGEST_NAME: Final = 24
"""Width, in characters, of the column of rows' names; a longer name wraps. A wider one leaves less for figures."""
WIDE: Final = 10_000
"""Characters of a console on which every table fits, for measuring the width that a table wants."""


class FiguresTable(Table):
    """A table with a column of names, then one for each kind of figure. Columns that do not fit are left out.

    The last columns are left out first, and those whose headings are in ``always`` after all others. A line below names
    the missing columns.
    """

    def __init__(
        self, names: str, *headings: str, title: str | None = None, always: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(title=title and escape(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        self.add_column(names, overflow="fold")
        for heading in headings:
            self.add_column(heading, justify="right", no_wrap=True)
        self._always = always

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self._fitting(console, options)
        yield from Table.__rich_console__(self._with(shown), console, options)
        if missing := [column for column in self.columns if all(column is not one for one in shown)]:
            names = ", ".join(in_one_line(column) for column in missing)
            yield Text(f"Not shown in {options.max_width} columns: {names}.", style="dim")

    def _fitting(self, console: Console, options: ConsoleOptions) -> list[Column]:
        """The columns that fit, in their order, the column of names first."""
        names = copy(self.columns[0])
        names.max_width = LONGEST_NAME
        wide = options.update(width=WIDE)
        shown = self.columns
        # The first column, the names, always stays; sorted() is stable, so that within each group the last goes first.
        leaving = self.columns[:0:-1]
        for column in sorted(leaving, key=lambda one: one.header in self._always):
            if Table.__rich_measure__(self._with([names, *shown[1:]]), console, wide).maximum <= options.max_width:
                break
            shown = [one for one in shown if one is not column]
        return shown

    def _with(self, columns: list[Column]) -> FiguresTable:
        """The same table with other columns, for measuring and for printing."""
        table = copy(self)
        table.columns = columns
        return table


def in_one_line(column: Column) -> str:
    """A column's heading without line breaks."""
    return " ".join(str(column.header).split())


# ------------------------------------------------------------------------------------------------------------- progress
# Progress bars on a terminal; elsewhere, as in a log, a line every few seconds.

HOUR: Final = 3600.0
"""Seconds over which a bar's rate is averaged, unless its caller chooses otherwise. Few tasks take longer, so that the
average is over a whole task."""
LINE_EVERY: Final = 10.0
"""Seconds between two lines of a task in a log. Shorter pauses make logs long."""


def progress_bar(console: Console, averaged_over: float = HOUR) -> Progress:
    """A progress bar with counts and times; lines in a log where ``console`` is no terminal.

    The remaining time follows from the speed over the last ``averaged_over`` seconds. An hour suits a bench, whose
    strategies take turns and differ in speed.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return progress_of(console, *columns, speed_estimate_period=averaged_over)


def progress_of(console: Console, *columns: ProgressColumn, **options: Any) -> Progress:
    """A bar with ``columns`` on a terminal; lines in a log elsewhere."""
    kind = Progress if console.is_terminal else LoggedProgress
    return kind(*columns, console=console, transient=True, disable=not console.is_terminal, **options)


class LoggedProgress(Progress):
    """A progress that prints a task's state every ``LINE_EVERY`` seconds, also while nothing advances."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._printed_at = self.get_time()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin, with a thread that prints while nothing advances."""
        super().start()
        threading.Thread(target=self._keep_printing, name="penstock-progress", daemon=True).start()

    def stop(self) -> None:
        """End the thread, then the progress itself."""
        self._stopped.set()
        super().stop()

    def _keep_printing(self) -> None:
        while not self._stopped.wait(LINE_EVERY):
            for task in self.tasks:
                if not task.finished:
                    self._print(task.id)

    def update(self, task_id: TaskID, **changes: Any) -> None:  # type: ignore[override]
        super().update(task_id, **changes)
        self._print(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print(task_id)

    def _print(self, task_id: TaskID) -> None:
        """Print the task's line, unless one was printed less than ``LINE_EVERY`` seconds ago."""
        with self._lock:  # the thread of ``start`` and callers of ``advance`` print, too; one line per interval
            if self.get_time() - self._printed_at < LINE_EVERY:
                return
            self._printed_at = self.get_time()
            line = line_of(self._tasks[task_id])
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def line_of(task: Task) -> str:
    """A task's line in a log, like ``the target's own answers: 256 of 1500, 0:05:12 so far, about 0:25:10 to go``."""
    if task.fields.get("in_percent"):
        done = f"{task.percentage:.0f}%"
    else:
        done = f"{task.completed:.0f}" + ("" if task.total is None else f" of {task.total:.0f}")
    parts = [f"{task.description}: {done}"]
    if task.elapsed is not None:
        parts.append(f"{timedelta(seconds=int(task.elapsed))} so far")
    if task.time_remaining is not None and not task.finished:
        parts.append(f"about {timedelta(seconds=int(task.time_remaining))} to go")
    return ", ".join(parts)


# --------------------------------------------------------------------------------------------------------- line editor
# Reads the lines that a person types. A paste of several lines is one input: the terminal marks it (bracketed paste).


class LineEditor:
    """A line editor on the terminal ``to``, with arrow keys and a history. Alt-Enter starts another line.

    Python's ``readline`` would not do: many builds link it against libedit, which takes every pasted line for an input.
    """

    def __init__(self, to: TextIO) -> None:
        self._to = to
        self._session = editing(to)

    def read(self, prompt: str) -> str | None:
        """The input, without the line feeds that end a paste; None where the person leaves with Ctrl-D."""
        try:
            if self._session is not None:
                return self._session.prompt([("bold", prompt)]).rstrip("\n")
        except EOFError:
            return None
        self._to.write(prompt)
        self._to.flush()
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None


def editing(to: TextIO) -> PromptSession[str] | None:
    """The session of prompts on the terminal ``to``; None on one that cannot move its cursor."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output.vt100 import Vt100_Output
    from prompt_toolkit.utils import is_dumb_terminal

    if is_dumb_terminal():
        return None
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def start_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    output = Vt100_Output.from_pty(to, term=os.environ.get("TERM"))
    output.enable_cpr = False  # do not ask the terminal where its cursor is: some never answer
    return PromptSession(key_bindings=keys, output=output, prompt_continuation="  ")
