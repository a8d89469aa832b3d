"""Write docs/reference/cli.md, every command with its options, from what ``--help`` shows.

python scripts/cli_docs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from typer.main import get_command

from penstock.cli.app import COMMANDS, app, loaded

PAGE: Final = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"
HEAD: Final = """\
# Command line

`python scripts/cli_docs.py` writes this page from what `penstock COMMAND --help` shows; change that, not this.

Exit codes: 0 after success; 1 after an error, which is one line that names what is wrong and the remedy; 2 for options
that do not fit; 130 after Ctrl-C.
"""


def page() -> str:
    """The whole of docs/reference/cli.md."""
    return "\n".join([HEAD, *(part for name, command in commands() for part in described(name, command))])


def commands() -> Iterator[tuple[str, Any]]:
    """Every command below ``penstock`` by its whole name, those below others behind them."""
    top = get_command(app)
    for name in COMMANDS:
        command = loaded(top.get_command(None, name))  # type: ignore[attr-defined]
        yield f"penstock {name}", command
        for below, one in getattr(command, "commands", {}).items():
            yield f"penstock {name} {below}", one


def described(name: str, command: Any) -> Iterator[str]:
    """A command: its line, what it does, and a table of options under each heading of its help."""
    arguments = [one for one in command.params if is_argument(one)]
    yield f"## `{name}`\n"
    yield f"    {' '.join([name, *map(usage, arguments), '[OPTIONS]'])}\n"
    yield f"{' '.join((command.help or '').split())}\n"
    for panel, options in panels_of(command).items():
        yield f"| {panel} | default | |\n| --- | --- | --- |"
        yield "\n".join(row(one) for one in options) + "\n"


def panels_of(command: Any) -> dict[str, list[Any]]:
    """A command's arguments and options under the headings of its help."""
    panels: dict[str, list[Any]] = {}
    for one in command.params:
        if not getattr(one, "hidden", False):
            panels.setdefault("Arguments" if is_argument(one) else one.rich_help_panel or "Options", []).append(one)
    return panels


def is_argument(parameter: Any) -> bool:
    return not parameter.opts[0].startswith("-")


def usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def row(parameter: Any) -> str:
    names = [usage(parameter)] if is_argument(parameter) else [*parameter.opts, *parameter.secondary_opts]
    if parameter.metavar and not is_argument(parameter):
        names[-1] += f" {parameter.metavar}"
    words = " ".join((parameter.help or "").split()).replace("|", "\\|")
    if parameter.envvar:
        words += f" Environment: `{parameter.envvar}`."
    return f"| {', '.join(f'`{name}`' for name in names)} | {default_of(parameter)} | {words} |"


def default_of(parameter: Any) -> str:
    """The default as the help shows it: words, a value, or nothing."""
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if parameter.required:
        return "required"
    hidden = not parameter.show_default or callable(parameter.default)
    return "" if hidden or parameter.default in (None, False, "", [], ()) else f"`{parameter.default}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
