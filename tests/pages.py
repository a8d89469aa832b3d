"""A reader of the pages for users: their commands in the order in which somebody types them, and what stands below."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from typer.main import get_command

from penstock.cli.app import app, loaded

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
]

BLOCK: Final = re.compile(r"^```(\w*)\n(.*?)^```$|((?:^(?: {4}[^\n]*)?\n)+)", re.MULTILINE | re.DOTALL)
"""A fenced block with its language, or an indented one; the latter may be blank lines alone."""
HOST: Final = re.compile(r"(first|second|others|both) +(?=\S)")
"""The host on which a line is typed, where a page has several."""
PROGRAM: Final = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:sudo )?"
    r"(?:penstock|python3?|pip|pipx|uv|git|curl|docker|ssh|ray|serve|torchrun|accelerate|printf|export|make|mkdir)"
    r"(?= |$)"
)
REMARK: Final = re.compile(r"\s{2,}#\s.*$")
CONTINUED: Final = re.compile(r"\\\n\s*")
INLINE: Final = re.compile(r"`(penstock [^`]+)`")
OWN: Final = (
    re.compile(r"(?:^|[|;&] *)(?:[A-Z_]+=\S+ )*penstock (.*)"),
    re.compile(r"^ssh \S+ \S+/penstock (.*)"),
    re.compile(r"-m penstock\.cli (.*)"),
)
"""Where the words for ``penstock`` begin in a command."""
BEHIND: Final = re.compile(r"(?<!\S)(?:\||>|2>|&&|&|;)(?!\S).*")
"""The rest of a line, which the shell keeps to itself or hands to another program."""


@dataclass(frozen=True)
class Typed:
    """A command, the host on which it is typed ("" where the page has one), the output shown, and its heading."""

    command: str
    host: str = ""
    shown: str = ""
    heading: str = ""


@dataclass(frozen=True)
class Source:
    """A block in another language than the shell's: ``python``, or a file's."""

    language: str
    text: str


def steps_of(text: str) -> list[Typed | Source]:
    """A page's commands and its blocks in other languages, in order."""
    steps: list[Typed | Source] = []
    for match in BLOCK.finditer(text):
        language, fenced, indented = match.groups()
        block = fenced if indented is None else re.sub(r"^ {4}", "", indented, flags=re.MULTILINE)
        if language in ("python", "toml"):
            steps.append(Source(language, block))
            continue
        heading = heading_before(text, match.start())
        for paragraph in re.split(r"\n{2,}", block.strip("\n")):
            if commands := list(commands_of(paragraph, heading)):
                steps += commands
            elif paragraph and steps and isinstance(last := steps[-1], Typed) and last.heading == heading:
                steps[-1] = replace(last, shown=f"{last.shown}{paragraph}\n")
    return steps


def heading_before(text: str, place: int) -> str:
    found = re.findall(r"^## (.+)$", text[:place], re.MULTILINE)
    return found[-1] if found else ""


def commands_of(block: str, heading: str = "") -> Iterator[Typed]:
    """The commands of a block, none where its first line is output; a quote or a backslash holds lines together."""
    lines = CONTINUED.sub("", block.strip("\n")).split("\n")
    if not PROGRAM.match(HOST.sub("", lines[0])):
        return
    command = ""
    for line in lines:
        said = REMARK.sub("", line).strip()  # but for a remark's sign in a quote
        command = f"{command}\n{line}" if command else said if is_whole(said) else line
        if command and is_whole(command):
            host = HOST.match(command)
            yield Typed(command[host.end() :] if host else command, host[1] if host else "", heading=heading)
            command = ""
    assert not command, f"a quote is open: {command}"


def is_whole(command: str) -> bool:
    try:
        shlex.split(command)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------- the options


def words_for_penstock(command: str) -> list[str] | None:
    """The words that ``penstock`` is given in a shell's command; None if the command calls it nowhere."""
    for pattern in OWN:
        if found := pattern.search(command):
            return shlex.split(BEHIND.sub("", found[1]))
    return None


def parse(words: list[str]) -> None:
    """Read the words as ``penstock`` does, up to where the command begins. Raises UsageError for what it refuses."""
    command: Any = get_command(app)
    context = command.make_context("penstock", list(words))
    while rest := [*context._protected_args, *context.args]:
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def unknown_in(words: list[str]) -> list[str]:
    """Those options, or the command, that ``penstock`` does not know; for prose, which leaves words out."""
    command: Any = get_command(app)
    known = {"--version", "--help", "--install-completion"}
    left, is_top = list(words), True
    while left and left[0] in getattr(command, "commands", {}):
        command = command.commands[left.pop(0)]
        command = loaded(command) if is_top else command
        is_top = False
        known |= {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    return [word for word in (left[:1] if is_top else left) if word not in known and (is_top or word.startswith("-"))]
