"""Write docs/reference/penstock.1, the manual page, from the command line's own help.

    python scripts/man_page.py
    man docs/reference/penstock.1

Every command has its options in the order and under the headings of ``--help``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import typer

import penstock
from penstock.cli.app import COMMANDS, app, loaded

PAGE: Final = Path(__file__).parent.parent / "docs" / "reference" / "penstock.1"
TYPERS: Final = ("install_completion", "show_completion")
"""Options of Typer's own, in its words."""
OTHERS: Final = "Options"
"""The heading of what has none."""


def page() -> str:
    top = typer.main.get_command(app)
    lines = [
        f'.TH PENSTOCK 1 "" "penstock {penstock.__version__}"',
        *(".SH NAME", f"penstock \\- {roff((top.help or '').removeprefix('Penstock: '))}"),
        *(".SH SYNOPSIS", ".B penstock", "COMMAND [OPTIONS]"),
        *(".SH OPTIONS", *options(top.params)),
        *(".SH SHELL COMPLETION", roff("penstock --install-completion sets it up for the shell that it is called in.")),
        ".SH COMMANDS",
    ]
    context = typer.Context(top)
    for name in COMMANDS:
        command = loaded(top.get_command(context, name))
        lines += [*described(f"penstock {name}", command)]
        for inner, one in getattr(command, "commands", {}).items():
            lines += [*described(f"penstock {name} {inner}", one)]
    return "\n".join([*lines, ""])


def described(name: str, command: Any) -> Iterator[str]:
    yield f".SS {roff(name)}"
    yield roff(inspect.cleandoc(command.help or ""))
    yield from options(command.params)


def options(parameters: list[Any]) -> Iterator[str]:
    shown = [one for one in parameters if not one.hidden and one.name not in TYPERS]
    for heading, group in groupby(shown, key=lambda one: getattr(one, "rich_help_panel", None) or OTHERS):
        yield ".PP"
        yield f".I {roff(heading)}"
        for one in group:
            yield ".TP"
            yield f".B {roff(names_of(one))}"
            yield roff(words_of(one))


def names_of(parameter: Any) -> str:
    """``--threads THREADS``; an argument by its own name."""
    written = parameter.metavar or parameter.name.upper()
    if parameter.param_type_name == "argument":
        return str(written)
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {written}"


def words_of(parameter: Any) -> str:
    """The help, and the default where there is one to show."""
    default = parameter.show_default if isinstance(parameter.show_default, str) else None
    if default is None and parameter.show_default and parameter.default not in (None, False, ()):
        default = str(parameter.default)
    words = " ".join((parameter.help or "").split())
    return f"{words} Default: {default}." if default else words


def roff(text: str) -> str:
    """Text that troff prints as it stands."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in escaped.splitlines() if line)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
