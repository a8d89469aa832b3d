"""One option: from a field's annotation to Typer's parameter, and from Typer's value to the field's."""

from __future__ import annotations

import inspect
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.config import FieldError
from penstock.files import NAMED_PIPE, is_named_pipe
from penstock.options import Option

REQUIRED: Final = inspect.Parameter.empty
FOLDER: Final = "FOLDER"
"""Metavar of options whose value is a folder's path, as text."""
WRITTEN: Final = (str, int, float, bool, Path)
"""Types that a command-line argument can have."""


@dataclass(frozen=True)
class Field:
    """A field of a group, or a parameter of a command. ``default`` is ``REQUIRED`` where there is none."""

    name: str
    hint: Any
    default: Any

    @property
    def option(self) -> Option | None:
        return next((one for one in typing.get_args(self.hint)[1:] if isinstance(one, Option)), None)


def parameter_of(field: Field) -> inspect.Parameter:
    """Typer's parameter for a field; one without an ``Option`` is Typer's own already."""
    option = field.option
    if option is None:
        return parameter(field.name, field.default, field.hint)
    settings: dict[str, Any] = {
        "help": option.help,
        "rich_help_panel": option.panel,
        "metavar": option.metavar,
        "envvar": option.envvar,
        "show_default": True if option.default is None else option.default or False,
    }
    info = typer.Argument(**settings) if option.positional else typer.Option(*names_of(field, option), **settings)
    default = written_default(field, option)
    hint = written_type(field, option)
    return parameter(field.name, default, Annotated[hint if default is not None else hint | None, info])


def names_of(field: Field, option: Option) -> tuple[str, ...]:
    """The option's names, () for Typer's default. A bool that is off by default has no name to switch it off."""
    own = f"--{field.name.replace('_', '-')}"
    return option.names or ((own,) if field.default is False else ())


def parameter(name: str, default: Any, hint: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def value_of(field: Field, given: Any) -> Any:
    """The field's value, from the value that Typer has read. Raises FieldError for a path that is a named pipe."""
    option = field.option
    for one in given if isinstance(given, list | tuple) else (given,):
        is_path = isinstance(one, Path) or (option is not None and option.metavar == FOLDER)
        if is_path and is_named_pipe(Path(one)):
            raise FieldError(field.name, f"is {str(one)!r}, which {NAMED_PIPE}")
    if option is None:
        return given
    if option.parse is not None:
        return option.parse(given)
    if is_tuple(field):
        return tuple(given)
    return not given if switches_off(field, option) else given


def written_type(field: Field, option: Option) -> Any:
    """The type that Typer reads: text if the option parses it, a list for a tuple, else the field's own."""
    if option.parse is not None:
        return str
    return list[typing.get_args(plain(field))[0]] if is_tuple(field) else plain(field)  # type: ignore[misc]


def written_default(field: Field, option: Option) -> Any:
    """The default that Typer shows; None where it shows none and the field's own default holds."""
    if field.default is REQUIRED:
        return REQUIRED
    if switches_off(field, option):
        return False
    if option.parse is not None:
        return text_of(field.default) if field.default and option.default is None else None
    return None if is_tuple(field) else field.default


def text_of(value: Any) -> str:
    """A value as typed on the command line: a tuple with commas, floats as short as possible."""
    if isinstance(value, tuple):
        return ",".join(map(text_of, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def switches_off(field: Field, option: Option) -> bool:
    return field.default is True and bool(option.names)


def is_tuple(field: Field) -> bool:
    return typing.get_origin(plain(field)) is tuple


def plain(field: Field) -> Any:
    """The field's type without ``Annotated``; of a union the part that can be written on a command line."""
    hint = typing.get_args(field.hint)[0]
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next(part for part in parts if part in WRITTEN or typing.get_origin(part) is tuple)
