"""Flags for the drafter and the strategy, which together make one ``speculative_config``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final

from penstock.config import FieldError
from penstock.drafters.base import DRAFTERS
from penstock.options import SPECULATION, Option
from penstock.speculation import SpeculativeConfig, parse_speculative
from penstock.strategies.base import STRATEGIES

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
