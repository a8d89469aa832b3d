"""The type of a section of the pages in docs/background/results, and its rendering as Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from benchmarks.shared.measured import Taken, stored

LINE, FEW = 116, 4
"""Columns of a command in the page, and most lines of commands that are not folded away."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section. ``take`` measures anew; None where that is done by hand. ``render`` makes Markdown of stored
    figures."""

    name: str
    title: str
    how: str
    take: Callable[[], Taken] | None
    render: Callable[[Any], str]


def page_part(section: Section) -> str:
    """A section in its page: title, how and when it was measured, its figures, and the commands."""
    measured = stored(section.name)
    found = f"*{measured.how}; {measured.date}.*"
    notes = [paragraphs(*measured.notes)] if measured.notes else []
    body = [found, section.render(measured.figures), *notes, block(measured.commands)]
    return "\n\n".join([f"## {section.title}", *body])


def paragraphs(*parts: str) -> str:
    """Parts with a blank line between them: prose in lines of at most 120 columns, tables unchanged."""
    return "\n\n".join(part if part.startswith("|") else prose(part) for part in parts)


def prose(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def block(commands: Sequence[str]) -> str:
    """Commands as Markdown code, with long ones over several lines, folded away where they are many."""
    lines = [line for command in commands for line in wrapped(command)]
    code = "\n".join(["```", *lines, "```"])
    return code if len(lines) <= FEW else f"<details><summary>Commands</summary>\n\n{code}\n\n</details>"


def wrapped(command: str) -> list[str]:
    """A command in lines of at most LINE columns, unless a word is longer, that a shell reads as one."""
    first, *words = map(quote, shlex.split(command))
    lines = [first]
    for word in words:
        if len(lines[-1]) + len(word) + 3 > LINE:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return lines


def quote(word: str) -> str:
    """The word in double quotes where these suffice, because brackets of strategies read worse in single ones."""
    return f'"{word}"' if "[" in word and not set(word) & set('"$`\\!') else shlex.quote(word)
