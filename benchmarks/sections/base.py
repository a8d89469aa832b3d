"""What a section of docs/results.md is, and how its figures are stored: benchmarks/measured/NAME.json."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Any

from penstock.core import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "benchmarks" / "measured"
BIN = Path(sys.executable).parent
FIELDS = ("how", "commands", "date", "versions", "figures")
LINE, FEW = 116, 4
"""Columns of a command in the page, and how many lines of them are shown at once."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures with what is needed to measure them again: commands, day (ISO) and versions by package.

    ``how`` says whether they are simulated, emulated or measured, and with which drafter. ``notes`` are true of these
    figures only and go when they are measured anew.
    """

    how: str
    commands: Sequence[str]
    date: str
    versions: Mapping[str, str]
    figures: Any
    notes: Sequence[str] = ()


Taken = tuple[list[str], Any]
"""Commands, and the figures that they gave."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """``take`` measures anew; None where that is done by hand. ``render`` turns stored figures into Markdown."""

    name: str
    title: str
    how: str
    take: Callable[[], Taken] | None
    render: Callable[[Any], str]


def stored(name: str) -> Measured:
    """What was measured last. Raises ConfigError naming the file and what to do where it is missing or damaged."""
    path = path_of(name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; {remedy(name)}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}; {remedy(name)}") from error
    missing = [field for field in FIELDS if field not in content]
    if missing:
        raise ConfigError(f"{path}: {missing[0]} is missing; {remedy(name)}")
    return Measured(**{field: content[field] for field in FIELDS}, notes=content.get("notes", []))


def store(name: str, how: str, taken: Taken) -> None:
    """Write what was just measured, with today's day and the versions installed."""
    commands, figures = taken
    measured = Measured(how=how, commands=commands, date=date.today().isoformat(), versions=versions(), figures=figures)
    path = path_of(name)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(measured), indent=1) + "\n", encoding="utf-8")
    part.replace(path)  # whoever stops us finds the old file or the new one


def kept_figures(name: str) -> dict[str, Any]:
    """What was measured so far of a section whose parts are stored one by one; nothing where there is none."""
    return dict(stored(name).figures) if path_of(name).exists() else {}


def path_of(name: str) -> Path:
    return MEASURED / f"{name}.json"


def remedy(name: str) -> str:
    return f"restore it from the repository, or run: python -m benchmarks.results --measure {name}"


def versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("penstock", "torch", "transformers")}
    return {"python": platform.python_version(), **packages}


def page_part(section: Section) -> str:
    """A section as it stands in the page: title, how and when, what it found, commands."""
    measured = stored(section.name)
    found = f"*{measured.how}; {measured.date}.*"
    notes = [paragraphs(*measured.notes)] if measured.notes else []
    body = [found, section.render(measured.figures), *notes, block(measured.commands)]
    return "\n\n".join([f"## {section.title}", *body])


def paragraphs(*parts: str) -> str:
    """Parts with a blank line between them: prose in lines of at most 120 columns, tables as they are."""
    return "\n\n".join(part if part.startswith("|") else prose(part) for part in parts)


def prose(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def block(commands: Sequence[str]) -> str:
    """Commands as Markdown code, long ones over several lines; folded away where they are more than a few."""
    lines = [line for command in commands for line in wrapped(command)]
    code = "\n".join(["```", *lines, "```"])
    return code if len(lines) <= FEW else f"<details><summary>Commands</summary>\n\n{code}\n\n</details>"


def wrapped(command: str) -> list[str]:
    """Lines of at most LINE columns, where words are not longer, that a shell reads as one command."""
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
    """Double quotes where they do, because what a strategy's brackets hold reads worse in single ones."""
    return f'"{word}"' if "[" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


# ---------------------------------------------------------------------------------------------------- running commands


def with_json_file(arguments: Sequence[str]) -> tuple[str, Any]:
    """Run ``penstock ARGUMENTS`` from the repository's folder. Its command line, and what ``--json FILE`` wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        penstock([*arguments, "--json", str(path)])
        return command_line(arguments), json.loads(path.read_text(encoding="utf-8"))


def with_json_output(arguments: Sequence[str]) -> tuple[str, Any]:
    """The same for commands whose ``--json`` prints the figures."""
    return command_line([*arguments, "--json"]), json.loads(penstock([*arguments, "--json"]))


def penstock(arguments: Sequence[str]) -> str:
    """What the command printed. Raises CalledProcessError where it fails."""
    done = subprocess.run([str(BIN / "penstock"), *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def command_line(arguments: Sequence[str]) -> str:
    return shlex.join(["penstock", *arguments])
