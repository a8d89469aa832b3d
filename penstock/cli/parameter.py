"""One option: from a field's annotation to Typer's parameter, and from what Typer has read to the field's value."""

from __future__ import annotations

import inspect
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.options import Option

REQUIRED: Final = inspect.Parameter.empty
WRITTEN: Final = (str, int, float, bool, Path)
"""Types that can be written on a command line."""


@dataclass(frozen=True)
class Field:
    """A group's field, or a command's parameter. ``default`` is ``REQUIRED`` where there is none."""

    name: str
    hint: Any
    default: Any

    @property
    def option(self) -> Option | None:
        return next((one for one in typing.get_args(self.hint)[1:] if isinstance(one, Option)), None)


def parameter_of(field: Field) -> inspect.Parameter:
    """What Typer makes an option or an argument of; a parameter without an ``Option`` is Typer's own already."""
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
    """Its own, else Typer's, but for a bool that is off by default: Typer would add a name that switches it off."""
    own = f"--{field.name.replace('_', '-')}"
    return option.names or ((own,) if field.default is False else ())


def parameter(name: str, default: Any, hint: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def value_of(field: Field, given: Any) -> Any:
    """The field's value, of what Typer has read."""
    option = field.option
    if option is None:
        return given
    if option.parse is not None:
        return option.parse(given)
    if is_tuple(field):
        return tuple(given)
    return not given if switches_off(field, option) else given


def written_type(field: Field, option: Option) -> Any:
    """Text where it is to be parsed, a list for a tuple."""
    if option.parse is not None:
        return str
    return list[typing.get_args(plain(field))[0]] if is_tuple(field) else plain(field)  # type: ignore[misc]


def written_default(field: Field, option: Option) -> Any:
    """The default as it could be written; None where Typer has none to show and the field's own is to hold."""
    if field.default is REQUIRED:
        return REQUIRED
    if switches_off(field, option):
        return False
    if option.parse is not None:
        return text_of(field.default) if field.default and option.default is None else None
    return None if is_tuple(field) else field.default


def text_of(value: Any) -> str:
    """A tuple with commas between, numbers as short as they can be."""
    if isinstance(value, tuple):
        return ",".join(map(text_of, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def switches_off(field: Field, option: Option) -> bool:
    return field.default is True and bool(option.names)


def is_tuple(field: Field) -> bool:
    return typing.get_origin(plain(field)) is tuple


def plain(field: Field) -> Any:
    """The type alone; of a union the part that can be written on a command line."""
    hint = typing.get_args(field.hint)[0]
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next(part for part in parts if part in WRITTEN or typing.get_origin(part) is tuple)
