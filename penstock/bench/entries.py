"""The strategies that a bench compares, as written: ``pipedec[width=16,children=8],pipedec[width=64],static_tree``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config import FieldError, nearest
from penstock.speculation import SpeculativeConfig, names_of, parse_speculative_for
from penstock.strategies.registry import STRATEGIES

Named = tuple[str, SpeculativeConfig | None]
"""An entry as written, and the configuration that it stands for; None decodes plainly."""

PLAIN = "autoregressive"
PLACED = " @ "
"""Separates an entry from the place where its drafter ran."""


def with_plain(strategies: Sequence[Named]) -> list[Named]:
    """``strategies``, led by plain decoding, whose output is the reference for the others and for the synthetic
    drafter."""
    plain = [one for one in strategies if is_plain(one[1])] or [(PLAIN, None)]
    return [*plain, *(one for one in strategies if not is_plain(one[1]))]


def is_plain(config: SpeculativeConfig | None) -> bool:
    return config is None or config.strategy == PLAIN


def split_entries(text: str) -> tuple[str, ...]:
    """The parts between commas outside brackets, stripped of blanks and without empty ones."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(part.strip() for part in parts if part.strip())


def strategy_of(label: str) -> str:
    """The name of the entry's strategy."""
    return re.split(rf"[][]|{PLACED}", label, maxsplit=1)[0].strip()


def parse_entries(entries: Sequence[str], common: Mapping[str, Any], target: str = "") -> list[Named]:
    """Each entry with the drafter and options of ``common`` for the model ``target``, overridden by its own.

    Raises FieldError naming the entry and its option, or the error in ``common``: an option there has to belong to at
    least one of the strategies.
    """
    own = {entry: own_options(entry) for entry in entries}
    speculating = list(dict.fromkeys(name for name in map(strategy_of, entries) if name != PLAIN))
    if common and not speculating:
        raise FieldError("speculative_config", f"means nothing to strategy {PLAIN!r}; remove it")
    configs = parse_speculative_for(common, speculating, target) if speculating else ()
    shared = dict(zip(speculating, configs, strict=True))
    return [(entry, with_own(entry, shared.get(strategy_of(entry)), own[entry])) for entry in entries]


def with_own(entry: str, shared: SpeculativeConfig | None, own: Mapping[str, Any]) -> SpeculativeConfig | None:
    if shared is None or not own:
        return shared
    try:
        return shared.with_options(own)
    except FieldError as error:
        raise FieldError("strategies", f"entry {entry!r}: {error}") from None


def own_options(entry: str) -> dict[str, Any]:
    """The options in an entry's brackets, by name. Raises FieldError for a name that is unknown or given twice."""
    strategy = strategy_of(entry)
    if PLACED in entry:
        raise FieldError("strategies", f"entry {entry!r}: say with drafter_on where the drafter runs, for all entries")
    if strategy not in STRATEGIES:
        raise FieldError("strategies", f"entry {entry!r}: strategy is {strategy!r}; {nearest(strategy, STRATEGIES)}")
    options: dict[str, Any] = {}
    for pair in split_entries(inside(entry)):
        name, equals, value = (part.strip() for part in pair.partition("="))
        known = names_of(STRATEGIES[strategy])
        if name not in known:
            raise FieldError(
                "strategies", f"entry {entry!r}: option {name!r} is unknown to {strategy!r}; {nearest(name, known)}"
            )
        if not equals or not value:
            raise FieldError("strategies", f"entry {entry!r}: option {name!r} has no value; write {name}=...")
        if name in options:
            raise FieldError("strategies", f"entry {entry!r}: option {name!r} is set twice; remove one")
        options[name] = value_of(value)
    return options


def inside(entry: str) -> str:
    """The text between an entry's brackets; empty where it has none."""
    _, bracket, rest = entry.partition("[")
    if not bracket and "]" not in entry:
        return ""
    if not rest.endswith("]") or rest.count("[") != rest.count("]") - 1 or not rest[:-1].strip():
        raise FieldError("strategies", f"entry {entry!r}: write the options as {strategy_of(entry)}[option=value,...]")
    return rest[:-1]


def value_of(text: str) -> Any:
    """The value of a JSON literal (numbers, true, lists), or the text itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text
