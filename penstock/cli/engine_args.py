"""The flags of every command with an engine: a model where none is named, the drafter and the strategy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from penstock.config import SPECULATION, FieldError, Option
from penstock.core import PenstockError
from penstock.drafters.base import DRAFTERS
from penstock.engine.options import MODEL_NAME, ModelOptions
from penstock.library.names import DEFAULT, PAIR
from penstock.speculation import SpeculativeConfig, parse_speculative
from penstock.strategies.base import STRATEGIES

if TYPE_CHECKING:
    from penstock.library.download import Unreachable


# -------------------------------------------------------------------------------------------------------- default model
# The model of a command that is given none: it is said which one it is, and asked before another takes its place.

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
    """The shipped pair, if a person at a terminal wants it instead. Raises PenstockError where nobody is there."""
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
        """The table ``speculative_config``. Raises FieldError."""
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
        """The configuration of all flags together, for the target ``model``. Raises FieldError."""
        table = self.drafting.table()
        if self.strategy is not None:
            if "strategy" in table:
                raise FieldError("strategy", "is set both by --strategy and in --speculative-config; remove one")
            table["strategy"] = self.strategy
        return parse_speculative(table, model)


def read_table(text: str | None) -> dict[str, Any]:
    """The JSON object that a flag gives; {} for None. Raises FieldError for anything else."""
    try:
        table = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise FieldError("speculative_config", f"is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise FieldError("speculative_config", f"is {text}; it has to be a JSON object")
    return table
