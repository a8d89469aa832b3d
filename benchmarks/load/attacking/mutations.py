"""Changes JSON values so that their readers are surprised. Every choice is left to the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, Final

Choose = Callable[[Sequence[Any], str], Any]
"""Chooses one of several; the text names the choice."""

HOSTILE: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2, 160, 1.5, -0.5, 10**6, 10**12, 2**31, 2**63, 10**30, float("nan"), float("inf")),
    *("", "x", "../x", "/etc/passwd", "org/code", "llama", "LlamaTokenizer", "\ud800", "x" * 1000, "</s>"),
    *([], [0], [1, "x"], [[]], [None], ["model.safetensors"], list(range(300))),
    *({}, {"a": 1}, {"": None}, {"type": "BPE"}, {"rope_type": "dynamic", "factor": 2.0}, {"0": {"content": "x"}}),
)
KINDS: Final = ("replace", "remove", "rename", "add", "whole")


def tables(value: Any) -> Iterator[dict[str, Any]]:
    """Every table in a JSON value, except for a tokenizer's hundreds of tokens, which are all alike."""
    if isinstance(value, dict) and len(value) < 100:
        yield value
        for inner in value.values():
            yield from tables(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from tables(inner)


def mutate(content: Any, fields: Sequence[str], choose: Choose) -> Any:
    """Make one change: a field is replaced, removed, renamed or added, or everything is replaced.

    ``fields`` are the names of fields that some code uses, wherever they are.
    """
    value = deepcopy(choose(HOSTILE, "value"))  # a copy, since later changes may alter it
    kind = choose(KINDS, "kind")
    found = list(tables(content))
    if kind == "whole" or not found:
        return value
    table = choose(found, "table")
    known = choose(list(table) or fields, "known")
    other = choose(fields, "other")
    if kind in ("remove", "rename"):
        removed = table.pop(known, None)
        if kind == "rename":
            table[other] = removed
    else:
        table[known if kind == "replace" else other] = value
    return content
