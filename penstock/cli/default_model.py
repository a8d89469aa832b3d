"""The model of a command that is given none: it is said which one it is, and asked before another takes its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from penstock.core import PenstockError
from penstock.engine.options import MODEL_NAME, ModelOptions
from penstock.library.names import DEFAULT, PAIR

if TYPE_CHECKING:
    from penstock.library.download import Unreachable

Options = TypeVar("Options")

THE_PAIR: Final = "the pair of small models that comes with the package, which continues Python"


@dataclass(frozen=True, kw_only=True)
class NamedModel(ModelOptions):
    """The model's options as a command has them."""

    model: Annotated[str, MODEL_NAME] = DEFAULT


def prepared(name: str, make: Callable[[str], Options], check: Callable[[Options], Any]) -> Options:
    """The options that ``make`` gives for the model ``name``.

    The default model is fetched by ``check``, which refuses what is wrong first, and said on standard error. Where it
    cannot be fetched, a person is asked whether the shipped pair may stand in. Raises PenstockError where there is
    nobody to ask, and whatever ``make`` and ``check`` raise.
    """
    options = make(name)
    if name != DEFAULT:
        return options
    from penstock.library.download import Unreachable
    from penstock.library.pull import default_words

    try:
        check(options)
    except Unreachable as error:
        if error.typed != DEFAULT:
            raise
        return make(stand_in(error))
    typer.echo(default_words(), err=True)
    return options


def stand_in(error: Unreachable) -> str:
    """The shipped pair, if a person at a terminal wants it instead. Raises PenstockError where nobody is there."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise PenstockError(f"{error}. '{PAIR}' is {THE_PAIR}: name it to run it") from error
    typer.echo(f"penstock: {error}", err=True)
    if not typer.confirm(f"Run '{PAIR}' instead, {THE_PAIR}?", err=True):
        raise typer.Exit(1)
    return PAIR
