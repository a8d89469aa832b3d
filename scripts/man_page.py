"""Write docs/reference/penstock.1, the manual page, from what ``--help`` shows.

python scripts/man_page.py
man docs/reference/penstock.1
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import penstock
from penstock.cli.app import app
from scripts.cli_docs import commands, default_of, is_argument, panels_of, usage

PAGE: Final = Path(__file__).parent.parent / "docs" / "reference" / "penstock.1"
COMPLETION: Final = "penstock --install-completion sets it up for the shell that it is called in."


def page() -> str:
    assert app.registered_callback is not None
    purpose = str(app.registered_callback.help).removeprefix("Penstock: ")
    head = [
        f'.TH PENSTOCK 1 "" "penstock {penstock.__version__}"',
        *(".SH NAME", f"penstock \\- {roff(purpose)}"),
        *(".SH SYNOPSIS", ".B penstock", "COMMAND [OPTIONS]"),
        *(".SH SHELL COMPLETION", roff(COMPLETION)),
        ".SH COMMANDS",
    ]
    return "\n".join([*head, *(line for name, command in commands() for line in described(name, command)), ""])


def described(name: str, command: Any) -> Iterator[str]:
    yield f".SS {roff(name)}"
    yield roff(" ".join((command.help or "").split()))
    for panel, options in panels_of(command).items():
        yield ".PP"
        yield f".I {roff(panel)}"
        for one in options:
            yield ".TP"
            yield f".B {roff(names_of(one))}"
            yield roff(words_of(one))


def names_of(parameter: Any) -> str:
    """``--threads THREADS``; an argument by its own name."""
    if is_argument(parameter):
        return usage(parameter)
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return names if parameter.is_flag else f"{names} {parameter.metavar or parameter.name.upper()}"


def words_of(parameter: Any) -> str:
    words = " ".join((parameter.help or "").split())
    default = default_of(parameter).strip("`")
    return f"{words} Default: {default}." if default and not parameter.required else words


def roff(text: str) -> str:
    """Text that troff prints as it stands."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in escaped.splitlines() if line)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
