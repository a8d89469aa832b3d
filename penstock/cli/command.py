"""Typer commands made from groups of options, so that each option is defined once, in its group.

::

    @command
    def generate(prompt: Prompt, model: ModelOptions, pipeline: PipelineOptions) -> None: ...

A group is a dataclass. Each of its fields with an ``Option`` becomes an option of the command; a field that is itself a
group contributes its own. A command's other parameters have an ``Option`` too, or are Typer's own.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from typing import Any

import typer

from penstock.cli.errors import reported
from penstock.cli.parameter import REQUIRED, Field, parameter_of, value_of


def new_app(*, completion: bool = False) -> typer.Typer:
    """An app of one command, or of several under one name. ``completion`` adds the options for shell completion."""
    return typer.Typer(
        add_completion=completion,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def command(function: Callable[..., None]) -> Callable[..., None]:
    """``function`` as a Typer command: options in place of groups, and Penstock's errors reported in one line."""

    def run(**given: Any) -> None:
        with reported():
            call(function, given)

    parameters = [parameter_of(field) for field in options_of(function)]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    # Typer reads the signature to find the options; ``run`` itself takes whatever Typer has parsed.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def options_of(owner: Any) -> Iterator[Field]:
    """The options of a command or a group; a group within it is replaced by its options."""
    for field in fields_of(owner):
        if is_group(field.hint):
            yield from options_of(field.hint)
        else:
            yield field


def call(owner: Any, given: dict[str, Any]) -> Any:
    """Call a command, or make a group, with the options that are given; the others keep their defaults."""
    arguments = {}
    for field in fields_of(owner):
        if is_group(field.hint):
            arguments[field.name] = call(field.hint, given)
        elif given[field.name] is not None:
            arguments[field.name] = value_of(field, given[field.name])
    return owner(**arguments)


def fields_of(owner: Any) -> Iterator[Field]:
    """A command's parameters, or those fields of a group that are groups or have an ``Option``."""
    hints = typing.get_type_hints(owner, include_extras=True)
    if is_group(owner):
        found = (Field(one.name, hints[one.name], default_of(one)) for one in dataclasses.fields(owner))
        yield from (field for field in found if field.option is not None or is_group(field.hint))
    else:
        for parameter in inspect.signature(owner).parameters.values():
            yield Field(parameter.name, hints[parameter.name], parameter.default)


def is_group(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The field's default; None where a factory makes it, REQUIRED where there is none."""
    if field.default is not MISSING:
        return field.default
    return REQUIRED if field.default_factory is MISSING else None
