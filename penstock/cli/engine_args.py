"""The flags of every command with an engine: the model if none is named, the drafter and the strategy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from penstock.config import SPECULATION, FieldError, Option
from penstock.core import PenstockError, from_json
from penstock.drafters.base import DRAFTERS
from penstock.engine.options import MODEL_NAME, ModelOptions
from penstock.library.names import DEFAULT, PAIR
from penstock.speculation import SpeculativeConfig, parse_speculative, parse_speculative_for
from penstock.strategies.base import STRATEGIES

if TYPE_CHECKING:
    from penstock.library.download import Unreachable


# -------------------------------------------------------------------------------------------------------- default model
# The default model. A command says that it takes it, and asks before another model takes its place.

Options = TypeVar("Options")

THE_PAIR: Final = "the pair of small models that comes with the package, which continues Python"
"""The shipped pair in words, for a question and an error."""


@dataclass(frozen=True, kw_only=True)
class NamedModel(ModelOptions):
    """The model's options, with the default model where a command is given none."""

    model: Annotated[str, MODEL_NAME] = DEFAULT


def prepared(name: str, make: Callable[[str], Options], check: Callable[[Options], Any]) -> Options:
    """The options that ``make`` gives for the model ``name``.

    If ``name`` is the default model, ``check`` refuses wrong options, then fetches it, and its name is printed on
    standard error. If it cannot be fetched, a person is asked whether the shipped pair may take its place. Raises
    PenstockError if nobody can be asked, and whatever ``make`` and ``check`` raise.
    """
    options = make(name)
    if name != DEFAULT:
        return options
    from penstock.library.download import Unreachable
    from penstock.library.shelf import default_words

    try:
        check(options)
    except Unreachable as error:
        if error.typed != DEFAULT:
            raise
        return make(stand_in(error))
    typer.echo(default_words(), err=True)
    return options


def stand_in(error: Unreachable) -> str:
    """The shipped pair, if a person at a terminal wants it instead. Raises PenstockError if there is no person."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise PenstockError(f"{error}. '{PAIR}' is {THE_PAIR}: name it to run it") from error
    typer.echo(f"penstock: {error}", err=True)
    if not typer.confirm(f"Run '{PAIR}' instead, {THE_PAIR}?", err=True):
        raise typer.Exit(1)
    return PAIR


# ---------------------------------------------------------------------------------------------------------- speculation
# Flags for the drafter and the strategy, which together make one ``speculative_config``.

EXAMPLE: Final = '{"method": "ngram", "width": 8}'
EVERYTHING: Final = (
    f"Everything about speculation, for example '{EXAMPLE}'. Methods: {', '.join(DRAFTERS)}; "
    'ngram also beside another, "method": ["eagle3", "ngram"].'
)


@dataclass(frozen=True, kw_only=True)
class DraftingOptions:
    """The flags that choose the drafter."""

    draft_model: Annotated[
        str | None,
        Option(
            "Small model that drafts; it needs the target's tokenizer. Without one, --model demo has its own and other "
            "models draft by prompt lookup.",
            SPECULATION,
            default="",
        ),
    ] = None
    speculative_config: Annotated[
        str | None,
        Option(
            EVERYTHING,
            SPECULATION,
            metavar="JSON",
            default="",
        ),
    ] = None

    def table(self) -> dict[str, Any]:
        """The table ``speculative_config`` of these flags.

        Raises FieldError for a text that is no JSON object, and for a model that is named twice.
        """
        table = read_table(self.speculative_config)
        if self.draft_model is not None:
            if "model" in table:
                raise FieldError("model", "is set both by --draft-model and in --speculative-config; remove one")
            table["model"] = self.draft_model
        return table


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """The flags that choose the strategy and the drafter."""

    strategy: Annotated[
        str | None,
        Option(
            f"Which drafted tokens enter the pipeline: {', '.join(STRATEGIES)} (none).",
            SPECULATION,
            values=tuple(STRATEGIES),
            default="auto",
        ),
    ] = None
    drafting: DraftingOptions

    def config(self, model: str) -> SpeculativeConfig:
        """The configuration of all these flags, for the target ``model``.

        Raises FieldError as ``parse_speculative`` does, and for a strategy named twice.
        """
        table = self.drafting.table()
        if self.strategy is None:
            return parse_speculative(table, model)
        if "strategy" in table:
            raise FieldError("strategy", "is set both by --strategy and in --speculative-config; remove one")
        return parse_speculative_for(table, [self.strategy], model)[0]


def read_table(text: str | None) -> dict[str, Any]:
    """The JSON object that a flag gives; {} if the flag is not given. Raises FieldError for anything else."""
    try:
        table = from_json(text) if text is not None else {}
    except ValueError as error:
        raise FieldError("speculative_config", f"is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise FieldError("speculative_config", f"is {text}; it has to be a JSON object")
    return table
